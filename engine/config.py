"""`EngineConfig`: what an engine can be asked for, checked before a model is loaded.

Its fields are the keywords of `LLM`, under the same names and with the same defaults. Those with a `Flag` are also the
flags of the command line, which are generated from them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from vattn.config import budget_bytes
from vattn.errors import ConfigError
from vattn.integers import shown
from vattn.quantised import KVCacheDtype
from vattn.units import parse_bytes

from .checks import checked_choice, checked_whole, number, whole
from .kv.make import BACKENDS, find_backend
from .scheduling.drafts import SpeculativeConfig
from .scheduling.scheduler import SCHEDULING, Policy, check_limits
from .scheduling.swap import PreemptionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from vattn.attention import Attention

    from .scheduling.record import StepRecord

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
_BUDGET = "4GiB"
# vLLM's, which is that of OpenAI's API.
_MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How the command line offers a field; a bool becomes a switch.

    Attributes:
        name: without its dashes; the field's own by default.
        parse: from text to the field's type.
        choices: the only values, where they are few.
        metavar: what stands for the value in the help.
    """

    help: str
    name: str | None = None
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None


def _num_threads(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def _flag(help: str, **how: Any) -> dict[str, Flag]:
    return {"flag": Flag(help=help, **how)}


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineConfig:
    """The keywords of `LLM`, which documents them, as one checked value.

    Numbers may be NumPy's and paths `os.PathLike`; Python's own int and str are stored, and a `torch.dtype`
    where `dtype` names one.

    Raises:
        ConfigError: an argument that is unknown, contradictory or impossible for any model.
    """

    model: str | os.PathLike[str] | PreTrainedModel
    kv: str = field(default="virtual", metadata=_flag("KV-cache backend", choices=BACKENDS))
    scheduling: str = field(
        default="continuous", metadata=_flag("static: batches that wait for their slowest request", choices=SCHEDULING)
    )
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = field(
        default=None, metadata=_flag("path or hub id of the tokenizer; default: the model's", metavar="PATH")
    )
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = field(default=False, metadata=_flag("run Python code from the checkpoint"))
    revision: str | None = field(
        default=None, metadata=_flag("branch, tag or commit of the model and tokenizer, on the hub")
    )
    hf_overrides: Mapping[str, Any] | None = field(
        default=None,
        metadata=_flag(
            'fields of the model\'s config that differ: {"max_position_embeddings": 8192}',
            parse=json.loads,
            metavar="JSON",
        ),
    )
    generation_config: str | os.PathLike[str] = field(
        default="auto",
        metadata=_flag(
            "whose sampling defaults hold: auto, the model's; vllm, those of SamplingParams; or a folder's",
        ),
    )
    tensor_parallel_size: int = field(default=1, metadata=_flag("devices that share a model: 1", parse=int))
    dtype: str | torch.dtype = field(
        default="auto", metadata=_flag("element type of weights and cache", choices=("auto", *_DTYPES))
    )
    max_num_seqs: int = field(default=64, metadata=_flag("maximum number of requests that run at a time", parse=int))
    max_num_batched_tokens: int = field(default=512, metadata=_flag("maximum number of tokens per step", parse=int))
    max_model_len: int | None = field(
        default=None, metadata=_flag("maximum number of tokens per request; default: the model's limit", parse=int)
    )
    memory_budget: int | str | None = field(
        default=None,
        metadata=_flag(
            f"size of the cache: bytes, text such as 512MiB, or auto; default: {_BUDGET}",
            name="kv-cache-memory-bytes",
            metavar="SIZE",
        ),
    )
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = field(
        default=None,
        metadata=_flag("share of the free memory for the cache, instead of a size", parse=float, metavar="SHARE"),
    )
    block_size: int = field(default=16, metadata=_flag("tokens per block of --kv paged", parse=int))
    kv_cache_dtype: KVCacheDtype = field(
        default="auto",
        metadata=_flag(
            "element type of the cache: the model's, or 8 bits with a scale per token and head (--kv virtual)",
            choices=get_args(KVCacheDtype),
        ),
    )
    kv_options: Mapping[str, Any] | None = field(
        default=None,
        metadata=_flag(
            'options of vattn.KVConfig for --kv virtual: {"page_size": 65536}', parse=json.loads, metavar="JSON"
        ),
    )
    enable_prefix_caching: bool = field(
        default=True, metadata=_flag("reuse what earlier requests with the same start have computed")
    )
    long_prefill_token_threshold: int = field(
        default=0, metadata=_flag("most tokens of one prompt in a step with other requests; 0 for no limit", parse=int)
    )
    max_logprobs: int = field(
        default=_MAX_LOGPROBS, metadata=_flag("most log probabilities per token; -1 for no limit", parse=int)
    )
    scheduling_policy: Policy = field(
        default="fcfs", metadata=_flag("order in which requests run", choices=get_args(Policy))
    )
    preemption_mode: PreemptionMode = field(
        default="auto",
        metadata=_flag("what happens to the cache of a preempted request", choices=get_args(PreemptionMode)),
    )
    swap_space: int | str = field(
        default="1GiB", metadata=_flag("host memory for caches of preempted requests", metavar="SIZE")
    )
    attention: str | Attention = field(default="auto", metadata=_flag("attention kernel; `vattn doctor` lists them"))
    num_threads: int | Literal["auto"] = field(
        default="auto",
        metadata=_flag(
            "threads that compute on a CPU; auto: measured as the engine runs", parse=_num_threads, metavar="NUMBER"
        ),
    )
    enforce_eager: bool = field(
        default=False, metadata=_flag("the model as transformers wrote it: no CUDA graphs, no packed weights")
    )
    speculative_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_flag(
            'draft tokens where text repeats itself: {"method": "ngram", "num_speculative_tokens": 4}',
            parse=json.loads,
            metavar="JSON",
        ),
    )
    seed: int | None = field(default=0, metadata=_flag("seed of requests and of the engine", parse=int))
    on_step: Callable[[StepRecord], None] | None = None

    def __post_init__(self) -> None:
        max_num_seqs, max_num_batched_tokens = check_limits(self.max_num_seqs, self.max_num_batched_tokens)
        self._set("max_num_seqs", max_num_seqs)
        self._set("max_num_batched_tokens", max_num_batched_tokens)
        self._set("block_size", checked_whole("block_size", self.block_size, 1))
        threshold = checked_whole("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        self._set("long_prefill_token_threshold", threshold)
        what = "how many log probabilities a request may ask for, or -1 for no limit"
        self._set("max_logprobs", checked_whole("max_logprobs", self.max_logprobs, -1, what=what))
        if self.num_threads != "auto":
            self._set("num_threads", checked_whole("num_threads", self.num_threads, 1))
        self._check_types()
        self._check_model()
        find_backend(self.kv, self.kv_cache_dtype, self.kv_options)
        self._check_memory()
        self._check_scheduling()

    # What depends on the model or the machine.

    def resolved_max_model_len(self, limit: int | None) -> int:
        """Most tokens of a request.

        Args:
            limit: the longest context of the model; None where its config states none.

        Raises:
            ConfigError: more than the model's limit, or neither of the two is known.
        """
        asked = self.max_model_len
        if asked is None:
            if limit is None:
                raise ConfigError("the model's config states no longest context; give max_model_len")
            return limit
        if limit is not None and asked > limit:
            raise ConfigError(
                f"max_model_len is {asked}, but the model's positions reach to {limit}; give at most {limit}"
            )
        return asked

    def resolved_memory_budget(self, device: torch.device) -> int | str:
        """The size of the cache: bytes or text; a share is measured now, so after the model is loaded."""
        if self.gpu_memory_utilization is not None:
            return budget_bytes("auto", device, self.gpu_memory_utilization)
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes
        return _BUDGET if self.memory_budget is None else self.memory_budget

    def _check_types(self) -> None:
        if self.on_step is not None and not callable(self.on_step):
            raise ConfigError(f"on_step is {shown(self.on_step)}; give a function of a StepRecord, or None")
        if self.seed is not None:
            seed = whole(self.seed)
            if seed is None:
                raise ConfigError(f"seed is {shown(self.seed)}; give a whole number, or None")
            self._set("seed", seed)
        options = self.kv_options
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(key, str) for key in options)):
            raise ConfigError(f"kv_options is {shown(options)}; give a mapping of options of KVConfig")
        for name in ("skip_tokenizer_init", "trust_remote_code", "enable_prefix_caching", "enforce_eager"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {shown(value)}; give True or False")
        if not isinstance(self.attention, str) and not hasattr(self.attention, "refusal"):
            raise ConfigError(f"attention is {shown(self.attention)}; give the name of a kernel, or an adapter")

    def _check_model(self) -> None:
        for name in ("model", "tokenizer"):
            if isinstance(path := getattr(self, name), os.PathLike):
                self._set(name, os.fspath(path))
        if self.tokenizer is not None and not isinstance(self.tokenizer, str) and not hasattr(self.tokenizer, "decode"):
            raise ConfigError(f"tokenizer is {shown(self.tokenizer)}; give a path, a hub id or a tokenizer")
        if not isinstance(self.dtype, str | torch.dtype):
            raise ConfigError(f"dtype is {shown(self.dtype)}; give auto, {', '.join(_DTYPES)}, or a torch.dtype")
        if isinstance(self.dtype, str) and self.dtype != "auto":
            if self.dtype not in _DTYPES:
                raise ConfigError(f"dtype={self.dtype!r} is not one of auto, {', '.join(_DTYPES)}")
            self._set("dtype", _DTYPES[self.dtype])
        if not isinstance(self.model, str | torch.nn.Module):
            raise ConfigError(f"model is {shown(self.model)}; give a path, a hub id, or a loaded causal language model")
        self._check_checkpoint()
        if checked_whole("tensor_parallel_size", self.tensor_parallel_size, 1) > 1:
            raise ConfigError(
                f"tensor_parallel_size is {shown(self.tensor_parallel_size)}, but a model runs on one device; run one "
                "engine per device behind a router, or choose a model that fits one: a smaller or a quantised one"
            )
        self._set("tensor_parallel_size", 1)
        if self.max_model_len is not None:
            asked = checked_whole("max_model_len", self.max_model_len, 0)
            if asked < 2:
                raise ConfigError(f"max_model_len is {asked}; a prompt and an output need at least 2 tokens")
            self._set("max_model_len", asked)

    def _check_checkpoint(self) -> None:
        """What says how a checkpoint is read, and has no meaning for a loaded model."""
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise ConfigError(f"revision is {shown(self.revision)}; give a branch, a tag or a commit, or None")
        overrides = self.hf_overrides
        if overrides is not None and not (
            isinstance(overrides, Mapping) and all(isinstance(key, str) for key in overrides)
        ):
            raise ConfigError(f"hf_overrides is {shown(overrides)}; give a mapping of fields of the model's config")
        if isinstance(self.generation_config, os.PathLike):
            self._set("generation_config", os.fspath(self.generation_config))
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ConfigError(f"generation_config is {shown(self.generation_config)}; give auto, vllm or a folder")
        for name in ("revision", "hf_overrides"):
            if getattr(self, name) is not None and not isinstance(self.model, str):
                raise ConfigError(f"{name} is for a path or a hub id, but the model is loaded already; leave it out")

    def _check_memory(self) -> None:
        parse_bytes(self.swap_space, "swap_space")
        sizes = ("memory_budget", "kv_cache_memory_bytes", "gpu_memory_utilization")
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            told = " and ".join(f"{name}={shown(getattr(self, name))}" for name in given)
            raise ConfigError(f"{told} {'both' if len(given) == 2 else 'all'} size the cache; give one")
        if self.kv_cache_memory_bytes is not None:
            self._set("kv_cache_memory_bytes", checked_whole("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1))
        if self.memory_budget is not None and self.memory_budget != "auto":
            parse_bytes(self.memory_budget, "memory_budget")
        if self.gpu_memory_utilization is None:
            return
        share = number(self.gpu_memory_utilization)
        if share is None or not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {shown(self.gpu_memory_utilization)}; give a share over 0 and up to 1"
            )

    def _check_scheduling(self) -> None:
        if self.scheduling not in SCHEDULING:
            raise ConfigError(
                f"scheduling={shown(self.scheduling)} is not known; choose one of {', '.join(SCHEDULING)}"
            )
        checked_choice("scheduling_policy", self.scheduling_policy, get_args(Policy))
        checked_choice("preemption_mode", self.preemption_mode, get_args(PreemptionMode))
        if self.speculative_config is not None:
            SpeculativeConfig.from_options(self.speculative_config)
            if self.scheduling != "continuous":
                raise ConfigError(f"speculative_config needs scheduling='continuous', not {self.scheduling!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
