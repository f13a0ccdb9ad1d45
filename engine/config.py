"""`EngineConfig`: what an engine can be asked for, checked before a model is loaded.

Its fields are the arguments of `LLM`, and the flags of the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch

from vattn.broker.places import check_name
from vattn.broker.share import parse_share
from vattn.config import budget_bytes
from vattn.drivers import parse as parse_device
from vattn.errors import ConfigError
from vattn.integers import shown
from vattn.quantised import KVCacheDtype
from vattn.units import parse_bytes

from .checks import checked_choice, checked_whole, number, whole
from .kv.base import NoPrefixCache
from .kv.make import BACKENDS, find_backend
from .options import json_value, option
from .scheduling.drafts import SpeculativeConfig
from .scheduling.scheduler import MOST_BATCHED_TOKENS, SCHEDULING, Policy, check_limits
from .scheduling.swap import PreemptionMode
from .shipped_model import shipped_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from vattn.attention import Attention

    from .scheduling.record import StepRecord

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
# Where nothing is given. A GPU's memory is for little else, and short steps leave it idle while Python plans the next.
_BUDGET = {"cpu": "4GiB", "cuda": "auto"}
_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
Role = Literal["both", "prefill", "decode"]
# vLLM's, which is that of OpenAI's API.
_MAX_LOGPROBS = 20
# Far above what helps, and what OpenMP can start: it ends the process where it cannot.
_MOST_THREADS = 1024


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"


def _num_threads(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


_num_threads.__name__ = "'auto' or number"  # what argparse calls it in its errors


@dataclass(frozen=True, eq=False)
class EngineConfig:
    """The arguments of `LLM` as one checked value.

    Numbers may be NumPy's and paths `os.PathLike`; Python's own int and str are stored, a `torch.dtype` where `dtype`
    names one, and the path of the model that ships with vattn where none is named.

    Raises:
        ConfigError: an argument that is contradictory, or impossible for any model.
    """

    model: str | os.PathLike[str] | PreTrainedModel | None = option(
        None,
        "path, hub id, or a loaded causal language model; by default the small one that ships with vattn. A loaded one "
        "is put in eval mode, and its attention implementation is `vattn`, until `close`; requests fail while it is in "
        "training mode",
        flag="",
    )
    _: KW_ONLY
    kv: str = option("virtual", "the KV-cache backend", choices=BACKENDS)
    scheduling: str = option(
        "continuous",
        "`continuous` plans every step anew; `static`, for comparison, runs a batch until its slowest request ends",
        choices=SCHEDULING,
    )
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = option(
        None,
        "path, hub id or tokenizer; by default the one at the model's path, and none for a loaded model",
        metavar="PATH",
    )
    skip_tokenizer_init: bool = option(
        False, "load no tokenizer: prompts are token ids, and outputs have no text", flag=""
    )
    trust_remote_code: bool = option(False, "run Python code that comes with a checkpoint")
    revision: str | None = option(None, "branch, tag or commit of model and tokenizer, for a hub id")
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        'fields of the model\'s config to read it with, by name: `{"max_position_embeddings": 8192}`. Nested ones are '
        'given as nested mappings, and stay where they are not: `{"rope_parameters": {"rope_theta": 1e6}}`',
        parse=json_value,
        metavar="JSON",
    )
    generation_config: str | os.PathLike[str] = option(
        "auto",
        "where the sampling parameters of requests without any come from: `auto`, the model's generation config; "
        "`vllm`, the defaults of `SamplingParams`; or a folder with a `generation_config.json`, whose end-of-sequence "
        "tokens, if it states any, then replace those of the model's",
    )
    tensor_parallel_size: int = option(1, "1: a model runs on one device", parse=int)
    device: str | torch.device = option(
        "auto",
        "where a model is loaded to, and the cache is: `cpu`, `cuda`, `cuda:1`; `auto` is a GPU if torch can use one. "
        "A loaded model stays where it is, on one device",
        metavar="DEVICE",
    )
    dtype: str | torch.dtype = option(
        "auto", "element type of weights and cache; `auto` is the checkpoint's", choices=("auto", *_DTYPES)
    )
    max_num_seqs: int = option(64, "maximum number of requests that run at a time", parse=int)
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens per step; longer prompts are computed in chunks. By default 512 on a CPU, 2048 on a "
        "GPU, and at least one per request",
        parse=int,
    )
    max_model_len: int | None = option(
        None, "maximum number of tokens of a request, prompt and output; by default the model's limit", parse=int
    )
    memory_budget: int | str | None = option(
        None,
        "size of the cache: bytes, text such as `512MiB`, or `auto`, a share of what is free once the model is loaded; "
        f"by default `{_BUDGET['cpu']}` on a CPU, `auto` on a GPU",
        flag="kv-cache-memory-bytes",
        metavar="SIZE",
    )
    kv_cache_memory_bytes: int | None = option(None, "`memory_budget` as a number of bytes", flag="")
    gpu_memory_utilization: float | None = option(
        None,
        "share of the free memory for the cache, over 0 and up to 1, in place of a size; on a CPU of the host's memory",
        parse=float,
        metavar="SHARE",
    )
    kv_pool: str | None = option(
        None,
        "the pool of a broker (`vattn pool serve NAME`) whose memory the cache borrows, with other engines of the "
        "machine; for `virtual`. Other sizes then only limit this cache",
        metavar="NAME",
    )
    kv_share: str | None = option(
        None,
        "what of the pool is guaranteed, and the most to be had: `at least 4GiB, at most 40GiB`; by default nothing, "
        "and all",
        metavar="SHARE",
    )
    kv_share_prefixes: bool = option(
        False,
        "share cached prefixes with other engines of the `kv_pool` that have the same weights and settings: what one "
        "has computed, the others map read-only, also after it has ended. On a CPU; for models without sliding windows",
    )
    role: Role = option(
        "both",
        "`prefill`: also compute prompts for other engines of the `kv_pool` that have the same weights and settings, "
        "once an `AsyncEngine` or a server runs this one; `decode`: have prompts computed by such engines, as long as "
        "there are any. Each of the two implies `kv_share_prefixes`",
        choices=get_args(Role),
    )
    kv_store: str | os.PathLike[str] | None = option(
        None,
        "a folder in which prefixes survive the engine: what requests compute is written there, in the background, and "
        "read again by later ones, of this engine or another one with the same weights. It holds prompts: only its "
        "owner may enter it. With `virtual` and `paged`",
        metavar="PATH",
    )
    kv_store_size: int | str = option(
        "16GiB",
        "most bytes in the folder, whoever wrote them; what was used longest ago is deleted first",
        metavar="SIZE",
    )
    block_size: int = option(16, "tokens per block, for `paged`", parse=int)
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "element type of the cache: `auto`, the model's; or `int8`, with a scale per token and head, for `virtual` and "
        "kernels that read request by request",
        choices=get_args(KVCacheDtype),
    )
    kv_options: Mapping[str, Any] | None = option(
        None,
        'further options of the backend: of `vattn.KVConfig` for `virtual`, such as `{"page_size": 65536}`; for '
        "`paged`, `num_blocks`, and `windows`: show blocks to kernels as contiguous memory, backed on demand "
        "(`vattn.BlockWindows`)",
        parse=json_value,
        metavar="JSON",
    )
    enable_prefix_caching: bool = option(
        True,
        "reuse the keys and values that earlier requests computed for the same prefix (under the same `cache_salt`), "
        "with `virtual` and `paged`; cached blocks are evicted when memory is needed",
    )
    long_prefill_token_threshold: int = option(
        0,
        "maximum number of a prompt's tokens in a step with other requests, so that a long one does not take all of "
        "it; 0 for no limit. For continuous scheduling",
        parse=int,
    )
    max_logprobs: int = option(
        _MAX_LOGPROBS,
        "the largest `logprobs` and `prompt_logprobs` that a request may ask for; -1 for no limit. The server reports "
        "at most 20, as OpenAI's does",
        parse=int,
    )
    scheduling_policy: Policy = option(
        "fcfs",
        "which requests run first and are preempted last: `fcfs` orders by arrival, `priority` by the priority of each "
        "request",
        choices=get_args(Policy),
    )
    preemption_mode: PreemptionMode = option(
        "auto",
        "what happens to the cache of a preempted request: `recompute`, `swap` (copied to host memory and back), or "
        "`auto`, whichever is estimated to be cheaper",
        choices=get_args(PreemptionMode),
    )
    swap_space: int | str = option(
        "1GiB",
        "maximum host memory for the caches of preempted requests, bytes or text; allocated on use",
        metavar="SIZE",
    )
    attention: str | Attention = option(
        "auto",
        "the kernel: one of those that `vattn doctor` lists, `auto` for the best one on this machine, or an adapter of "
        "`vattn.attention`",
    )
    num_threads: int | Literal["auto"] = option(
        "auto",
        "threads that compute a step on a CPU. `auto` measures steps with one thread up to torch's number "
        "(`OMP_NUM_THREADS`, `torch.set_num_threads`), when the model is loaded and as the engine runs, prefill and "
        "decode steps apart: a small model, or a busy machine, is faster with fewer",
        parse=_num_threads,
        metavar="NUMBER",
    )
    enforce_eager: bool = option(
        False,
        "run the model as transformers wrote it: no CUDA graphs of decode steps, no packed weights and fused products, "
        "and no latents in the cache in place of keys and values",
    )
    speculative_config: Mapping[str, Any] | None = option(
        None,
        "decode several tokens per step where text repeats itself: "
        '`{"method": "ngram", "num_speculative_tokens": 4}`, and `prompt_lookup_max` (4) and `prompt_lookup_min` (2): '
        "how many of the last tokens have to match; if only one is given, the default of the other gives way to it. "
        "Outputs are those of plain decoding, except for ties that rounding decides",
        parse=json_value,
        metavar="JSON",
    )
    seed: int | None = option(0, "seed of requests without one; None, from Python, for a random one", parse=int)
    on_step: Callable[[StepRecord], None] | None = option(
        None, "called with a `StepRecord` after each step; may be set later", flag=""
    )

    def __post_init__(self) -> None:
        asked = self.max_num_batched_tokens
        most = MOST_BATCHED_TOKENS if asked is None else asked
        max_num_seqs, max_num_batched_tokens = check_limits(self.max_num_seqs, most)
        self._set("max_num_seqs", max_num_seqs)
        if asked is not None:
            self._set("max_num_batched_tokens", max_num_batched_tokens)
        self._set("block_size", checked_whole("block_size", self.block_size, 1))
        threshold = checked_whole("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        self._set("long_prefill_token_threshold", threshold)
        what = "how many log probabilities a request may ask for, or -1 for no limit"
        self._set("max_logprobs", checked_whole("max_logprobs", self.max_logprobs, -1, what=what))
        if self.num_threads != "auto":
            self._set("num_threads", checked_whole("num_threads", self.num_threads, 1, _MOST_THREADS))
        self._check_types()
        self._check_model()
        find_backend(self.kv, self.kv_cache_dtype, self.kv_options)
        self._check_memory()
        self._check_scheduling()

    # What depends on the model or the machine.

    def resolved_device(self) -> torch.device:
        """Where the model is, or is to be loaded to."""
        if not isinstance(self.model, str):
            return cast("PreTrainedModel", self.model).device
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return parse_device(self.device)

    def resolved_max_num_batched_tokens(self, device: torch.device) -> int:
        """Most tokens of a step."""
        asked = self.max_num_batched_tokens
        return max(_BATCHED_TOKENS[_kind(device)], self.max_num_seqs) if asked is None else asked

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
        if self.memory_budget is None:
            return _BUDGET[_kind(device)] if self.kv_pool is None else "auto"
        return self.memory_budget

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
        for name in (each.name for each in fields(self) if isinstance(each.default, bool)):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {shown(value)}; give True or False")
        if isinstance(self.attention, type) or not (
            isinstance(self.attention, str) or hasattr(self.attention, "refusal")
        ):
            raise ConfigError(f"attention is {shown(self.attention)}; give the name of a kernel, or an adapter")

    def _check_model(self) -> None:
        if self.model is None:
            self._set("model", shipped_model())
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
        if not isinstance(self.model, str) and not (
            isinstance(self.model, torch.nn.Module) and hasattr(self.model, "set_attn_implementation")
        ):
            raise ConfigError(f"model is {shown(self.model)}; give a path, a hub id, or a loaded causal language model")
        self._check_checkpoint()
        self._check_device()
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

    def _check_device(self) -> None:
        if self.device == "auto":
            return
        device = parse_device(self.device)
        if isinstance(self.model, str):
            if device.type == "cuda" and not torch.cuda.is_available():
                raise ConfigError(
                    f"device={str(self.device)!r}, but torch {torch.__version__} can use no GPU here: `vattn doctor` "
                    "says what is missing, and device='cpu' needs none"
                )
            return
        where = cast("PreTrainedModel", self.model).device
        if where.type != device.type or device.index not in (None, where.index):
            raise ConfigError(
                f"the loaded model is on {where}, not on device={str(self.device)!r}; move it first: "
                f"model.to({str(self.device)!r})"
            )

    def _check_memory(self) -> None:
        if self.kv_pool is not None:
            check_name(self.kv_pool, "kv_pool")
            if self.kv != "virtual":
                raise ConfigError(f"kv_pool lends memory to kv='virtual', not to kv={self.kv!r}; leave one of them out")
        if self.kv_share is not None:
            if self.kv_pool is None:
                raise ConfigError("kv_share is a share of a kv_pool; name the pool too")
            parse_share(self.kv_share)
        checked_choice("role", self.role, get_args(Role))
        if self.role != "both":
            if self.kv_pool is None or not self.enable_prefix_caching or self.scheduling != "continuous":
                raise ConfigError(
                    f"role={self.role!r} needs a kv_pool, enable_prefix_caching=True and scheduling='continuous'"
                )
            self._set("kv_share_prefixes", True)
        if self.kv_share_prefixes and (self.kv_pool is None or not self.enable_prefix_caching):
            raise ConfigError("kv_share_prefixes needs a kv_pool, and enable_prefix_caching=True")
        self._check_store()
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

    def _check_store(self) -> None:
        parse_bytes(self.kv_store_size, "kv_store_size")
        if self.kv_store is None:
            return
        if isinstance(self.kv_store, os.PathLike):
            self._set("kv_store", os.fspath(self.kv_store))
        if not isinstance(self.kv_store, str) or not self.kv_store:
            raise ConfigError(f"kv_store is {shown(self.kv_store)}; give a folder")
        if issubclass(find_backend(self.kv, self.kv_cache_dtype, self.kv_options), NoPrefixCache):
            raise ConfigError(f"kv_store stores cached prefixes, of which kv={self.kv!r} has none; use kv='virtual'")
        if not self.enable_prefix_caching or self.scheduling != "continuous":
            raise ConfigError("kv_store needs enable_prefix_caching=True and scheduling='continuous'")

    def _check_scheduling(self) -> None:
        if self.scheduling not in SCHEDULING:
            raise ConfigError(
                f"scheduling={shown(self.scheduling)} is not known; choose one of {', '.join(SCHEDULING)}"
            )
        checked_choice("scheduling_policy", self.scheduling_policy, get_args(Policy))
        checked_choice("preemption_mode", self.preemption_mode, get_args(PreemptionMode))
        if self.scheduling_policy != "fcfs" and self.scheduling != "continuous":
            raise ConfigError(
                f"scheduling_policy={self.scheduling_policy!r} needs scheduling='continuous', not {self.scheduling!r}"
            )
        if self.speculative_config is not None:
            SpeculativeConfig.from_options(self.speculative_config)
            if self.scheduling != "continuous":
                raise ConfigError(f"speculative_config needs scheduling='continuous', not {self.scheduling!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
