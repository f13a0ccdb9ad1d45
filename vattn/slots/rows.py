"""Rows of tokens as plain bytes, so that they can be copied whatever their element type."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vattn import _native
from vattn.layout import TensorKind


class TokenRows:
    """The virtual tensors of a band, addressed by token."""

    def __init__(
        self, kinds: Sequence[TensorKind], spaces: Sequence[_native.AddressSpace], dlpack_device: tuple[int, int]
    ) -> None:
        # A tensor created in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._tensors = [
                (space.tensor(i, *dlpack_device).view(space.slots, kind.runs, -1), kind.row_bytes)
                for kind, space in zip(kinds, spaces, strict=True)
                for i in range(kind.tensors)
            ]

    def views(self, slot: int, start: int, end: int) -> list[torch.Tensor]:
        """The rows of tokens `[start, end)`: per virtual tensor, `[runs, bytes]`."""
        return [tensor[slot, :, start * size : end * size] for tensor, size in self._tensors]

    def write(self, slot: int, start: int, rows: Sequence[torch.Tensor]) -> None:
        """Copies rows to the tokens from `start` on, with one copy per virtual tensor, on torch's current stream."""
        for (tensor, size), source in zip(self._tensors, rows, strict=True):
            offset = start * size
            tensor[slot, :, offset : offset + source.shape[1]].copy_(source)
