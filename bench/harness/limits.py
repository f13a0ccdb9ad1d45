"""The least time that attention takes on a CPU: its products alone, or reading keys and values alone.

Both are timed like any other side of a benchmark, in the same rounds and on the same threads. The larger one is the
limit: a kernel that computes while it reads could reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vattn import cpu

SIDES = ("products", "reading")
_EVICTION = 128 * 2**20  # bytes: more than the caches of one machine's share hold


def cold() -> Callable[[object], object]:
    """Of `interleave`: calls find nothing in the caches, as the layers of a model do whose weights fill them."""
    memory = torch.zeros(_EVICTION, dtype=torch.uint8)
    return lambda action: memory.add_(1)


def warm(action: Callable[[], object]) -> object:
    """Of `interleave`: calls find what the same call before them has left."""
    return action()


def actions(memory: Sequence[Tensor], products: int, stored: torch.dtype) -> dict[str, Callable[[], object]]:
    """A call of each of `SIDES`.

    Args:
        memory: the keys and values that are read (and scales), or as many bytes of anything else; contiguous.
        products: multiply-adds of queries with keys and of weights with values.
        stored: the type of the keys and values, which decides how the kernels multiply.
    """

    def reading() -> None:
        for tensor in memory:
            cpu.read(tensor)

    return {"products": lambda: cpu.products(stored, products), "reading": reading}
