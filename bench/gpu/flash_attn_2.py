"""flash-attn 2 from the library that bench/gpu/build_fa2.sh builds, where the package itself is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu import carried

LIBRARY = Path(__file__).parents[2] / "build" / "fa2" / "vattn_fa2.so"
HEAD_DIMS = (64, 128)


def provide(library: Path = LIBRARY) -> str | None:
    """Puts the library where the adapter `flash_attn_2` looks for the package, unless there is one already.

    Returns:
        Why there is no flash-attn afterwards, as a clause; None if there is.
    """
    return carried.put("flash_attn", library, "bench/gpu/build_fa2.sh builds it", flash_attn_with_kvcache)


def lacks(head_dim: int) -> str | None:
    """What the adapter `flash_attn_2` does not know: that the library, if it stands in, has few head sizes."""
    package = sys.modules.get("flash_attn")
    if getattr(package, "flash_attn_with_kvcache", None) is not flash_attn_with_kvcache or head_dim in HEAD_DIMS:
        return None
    return f"{LIBRARY.name} is built for heads of {' and '.join(map(str, HEAD_DIMS))}, not of {head_dim}"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
) -> Tensor:
    """The package's function, without the arguments that append to the cache, rotate, or return the softmax's sums."""
    output: Tensor = torch.ops.vattn_fa2.fwd_kvcache(
        q, k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal, *window_size, softcap, num_splits,
    )  # fmt: skip
    return output
