"""The choice of a backend, and its size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from vattn import drivers
from vattn.config import KVConfig, budget_bytes
from vattn.engine.checks import checked_choice, checked_whole
from vattn.engine.kv.base import BACKENDS, KVBackend
from vattn.engine.kv.dynamic import DynamicKV
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.quantised import QuantisedKV
from vattn.engine.kv.static import StaticKV
from vattn.engine.kv.virtual import VirtualKV
from vattn.errors import ConfigError
from vattn.integers import shown
from vattn.units import format_bytes

if TYPE_CHECKING:
    from vattn.packed import KVShape

KVCacheDtype = Literal["auto", "int8"]


def check_backend(kv: str, kv_cache_dtype: KVCacheDtype) -> None:
    """Raise a ConfigError unless there is a backend `kv` that stores this type."""
    if kv not in BACKENDS:
        raise ConfigError(f"kv={shown(kv)} is not a backend; choose one of {', '.join(BACKENDS)}")
    checked_choice("kv_cache_dtype", kv_cache_dtype, get_args(KVCacheDtype))
    if kv_cache_dtype != "auto" and kv != "virtual":
        raise ConfigError(f"kv={kv!r} stores keys and values in the model's type only; use kv='virtual' for int8")


def make_backend(
    kv: str,
    shape: KVShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    memory_budget: int | str,
    block_size: int = 16,
    kv_cache_dtype: KVCacheDtype = "auto",
    guard_rows: int = 0,
    chunk_tokens: int | None = None,
    kv_options: dict[str, Any] | None = None,
) -> KVBackend:
    """The backend called `kv`, sized for `shape`: as many units as the budget holds, and no more than can be used.

    Args:
        memory_budget: bytes, text such as "4GiB", or "auto"; see `vattn.KVConfig`.
        block_size: tokens per block, of `paged`.
        kv_cache_dtype: "auto", as `dtype` says, or "int8": quantised, in `virtual`.
        guard_rows: rows past a length that the kernel may read, which `virtual` then backs.
        chunk_tokens: most tokens of a request in one step.
        kv_options: further options of `vattn.KVConfig`, for `virtual`.

    Raises:
        ConfigError: an unknown name, options that it does not have, or a budget below one unit.
    """
    check_backend(kv, kv_cache_dtype)
    if kv == "virtual":
        config = KVConfig.from_options(
            groups=shape.groups(max_model_len),
            dtype=dtype,
            device=device,
            max_batch_size=max_num_seqs,
            max_context_len=max_model_len,
            memory_budget=memory_budget,
            **{"guard_rows": guard_rows, **(kv_options or {})},
        )
        backend = QuantisedKV if kv_cache_dtype == "int8" else VirtualKV
        return backend(config, chunk_tokens=chunk_tokens)
    if kv_options:
        raise ConfigError(f"kv={kv!r} takes no kv_options, but was given {sorted(kv_options)}; they are for 'virtual'")
    block_size = checked_whole("block_size", block_size, 1)

    layer = shape.stored_alike
    if layer is None:
        shapes = sorted({(each.num_kv_heads, each.head_dim, each.v_head_dim) for each in shape.layers})
        raise ConfigError(
            f"kv={kv!r} stores all layers alike, but the model's differ in (KV heads, key size, value size): {shapes}; "
            "use kv='virtual'"
        )
    sizes = {
        "num_layers": shape.num_layers,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "v_head_dim": layer.v_head_dim,
    }
    budget = budget_bytes(memory_budget, device)
    token_bytes = shape.token_elements * dtype.itemsize
    unit, unit_tokens, advice = {
        "paged": ("block", block_size, "a smaller block_size"),
        "static": ("slot", max_model_len, "a smaller max_model_len"),
        "dynamic": ("token", 1, "a smaller model"),
    }[kv]
    units = min(budget // (unit_tokens * token_bytes), max_num_seqs * -(-max_model_len // unit_tokens))
    if units < 1:
        raise ConfigError(
            f"memory_budget is {format_bytes(budget)}, but one {unit} of {unit_tokens} tokens takes "
            f"{format_bytes(unit_tokens * token_bytes)}; give more memory or {advice}"
        )
    common: dict[str, Any] = {**sizes, "dtype": dtype, "device": device, "max_model_len": max_model_len}
    if kv == "static":
        # Committed at once, so Linux would end a process for it that a pool of pages refuses by and by.
        free = drivers.find(device).available_memory()
        if units * unit_tokens * token_bytes > free:
            raise ConfigError(
                f"{units} slots of {max_model_len} tokens take {format_bytes(units * unit_tokens * token_bytes)}, but "
                f"{format_bytes(free)} is free; lower memory_budget, max_num_seqs or max_model_len"
            )
        return StaticKV(num_slots=units, **common)
    if kv == "dynamic":
        return DynamicKV(num_tokens=units, max_num_seqs=max_num_seqs, **common)
    return PagedKV(num_blocks=units, max_num_seqs=max_num_seqs, block_size=block_size, **common)
