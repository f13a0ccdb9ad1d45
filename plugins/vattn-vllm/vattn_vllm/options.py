"""The plugin's options, from vLLM's `--additional-config '{"vattn": {...}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from vattn.errors import ConfigError
from vattn_vllm.budget import parse_budget

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Options:
    """How the cache of a worker lies in memory, and how much of it stays.

    Attributes:
        kernel: of `vattn.attention`; "auto" takes the first that can compute the model.
        page_size: bytes of a page; "auto" takes the largest that divides a block.
        layout: "layered", "fused" or "auto", as in `vattn.BlockWindows`.
        spare_windows: windows beyond `max_num_seqs`, which keep the mappings of requests that have ended.
        guard: what a stray read sees on the host: "zero" or "strict" (a fault).
        keep_cached: share of the blocks that may stay in the prefix cache when no request is left, 0 to 1; the least
            recently used go first.
        keep_free: share of the blocks whose memory is kept, without contents, for requests to come.
        shared_budget: `"NAME:SIZE"`: the most memory that the engines of this name on this machine back together; each
            may have blocks for the whole budget. None: an engine backs what its own blocks need.
        untested_vllm: run with a version of vLLM that the plugin was not tried with.
    """

    kernel: str = "auto"
    page_size: int | Literal["auto"] = "auto"
    layout: Literal["auto", "layered", "fused"] = "auto"
    spare_windows: int = 8
    guard: Literal["zero", "strict"] = "zero"
    keep_cached: float = 1.0
    keep_free: float = 0.05
    shared_budget: str | None = None
    untested_vllm: bool = False

    def __post_init__(self) -> None:
        for name in ("keep_cached", "keep_free"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ConfigError(f"vattn: {name}={share!r} is a share of the blocks, from 0 to 1")
        if isinstance(self.spare_windows, bool) or not isinstance(self.spare_windows, int) or self.spare_windows < 0:
            raise ConfigError(f"vattn: spare_windows={self.spare_windows!r} must be 0 or more")
        if self.shared_budget is not None:
            parse_budget(self.shared_budget)
        if self.guard not in ("zero", "strict"):
            raise ConfigError(f"vattn: guard={self.guard!r} is not 'zero' or 'strict'")

    @classmethod
    def of(cls, config: VllmConfig) -> Options:
        """The options of an engine.

        Raises:
            ConfigError: an unknown option, or a value that is not possible.
        """
        additional = config.additional_config
        given: Any = additional.get("vattn", {}) if isinstance(additional, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ConfigError(f'vattn: --additional-config has "vattn": {given!r}; give an object of options')
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(f"vattn: there is no option {unknown[0]!r}; there are {', '.join(known)}")
        return cls(**given)


def selected(config: VllmConfig) -> bool:
    """Whether this engine's workers are the plugin's."""
    worker = config.parallel_config.worker_cls
    module = worker if isinstance(worker, str) else worker.__module__
    return module.split(".")[0] == "vattn_vllm"
