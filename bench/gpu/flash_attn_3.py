"""flash-attn 3 from the library that bench/gpu/fetch_fa3.sh takes from vLLM's wheel, where it is not installed.

It is vLLM's fork, and what vLLM computes attention with on Hopper.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bench.gpu import carried

LIBRARY = Path(__file__).parents[2] / "build" / "fa3" / "vllm_fa3.so"


def provide(library: Path = LIBRARY) -> str | None:
    """Puts the library where the adapter `flash_attn_3` looks for the package, unless there is one already.

    Returns:
        Why there is no flash-attn 3 afterwards, as a clause; None if there is.
    """
    return carried.put("flash_attn_interface", library, "bench/gpu/fetch_fa3.sh fetches it", flash_attn_with_kvcache)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
) -> Tensor:
    """The package's function, without the arguments that append to the cache, rotate, or return the softmax's sums."""
    output: Tensor = torch.ops._vllm_fa3_C.fwd(
        q, k_cache, v_cache, None, None, None, None, cu_seqlens_q, None, None, None, cache_seqlens, max_seqlen_q, None,
        page_table, *8 * [None],
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal, *window_size, softcap, True, None, num_splits, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip
    return output
