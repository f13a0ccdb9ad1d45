"""The plugin's options, from vLLM's `--additional-config '{"vattn": {...}}'`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from vattn.broker.places import check_name
from vattn.broker.share import parse_share
from vattn.errors import ConfigError

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
        kv_pool: the pool of a broker (`vattn pool serve NAME`) that lends the memory, to other engines of the machine
            as well. None: there is memory for all blocks.
        kv_share: what of the pool is guaranteed, and the most to be had: `"at least 4GiB, at most 40GiB"`; None:
            nothing, and all.
        untested_vllm: run with a version of vLLM that the plugin was not tried with.
    """

    kernel: str = "auto"
    page_size: int | Literal["auto"] = "auto"
    layout: Literal["auto", "layered", "fused"] = "auto"
    spare_windows: int = 8
    guard: Literal["zero", "strict"] = "zero"
    keep_cached: float = 1.0
    keep_free: float = 0.05
    kv_pool: str | None = None
    kv_share: str | None = None
    untested_vllm: bool = False

    def __post_init__(self) -> None:
        for name in ("keep_cached", "keep_free"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ConfigError(f"vattn: {name}={share!r} is a share of the blocks, from 0 to 1")
        if isinstance(self.spare_windows, bool) or not isinstance(self.spare_windows, int) or self.spare_windows < 0:
            raise ConfigError(f"vattn: spare_windows={self.spare_windows!r} must be 0 or more")
        if self.kv_pool is not None:
            check_name(self.kv_pool, "kv_pool")
        if self.kv_share is not None:
            if self.kv_pool is None:
                raise ConfigError("vattn: kv_share is a share of a kv_pool; name the pool too")
            parse_share(self.kv_share)
        if not isinstance(self.untested_vllm, bool):
            raise ConfigError(f"vattn: untested_vllm={self.untested_vllm!r} is not true or false")
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
        if "shared_budget" in given:
            raise ConfigError(
                "vattn: a broker keeps the budget of several engines, in place of shared_budget: vattn pool serve NAME "
                '--budget SIZE, and the option "kv_pool": "NAME"'
            )
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(f"vattn: there is no option {unknown[0]!r}; there are {', '.join(known)}")
        return cls(**given)


def selected(config: VllmConfig) -> bool:
    """Whether this engine's workers are the plugin's, or of a subclass of theirs.

    Raises:
        ImportError, AttributeError: there is no such class.
    """
    worker: Any = config.parallel_config.worker_cls
    if isinstance(worker, str):
        module, _, name = worker.rpartition(".")
        if _package(module) in ("", "vllm", "vattn_vllm"):  # without an import, which takes seconds
            return _package(module) == "vattn_vllm"
        worker = getattr(importlib.import_module(module), name)
    return any(_package(base.__module__) == "vattn_vllm" for base in worker.__mro__)


def _package(module: str) -> str:
    return module.split(".")[0]
