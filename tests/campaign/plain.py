"""What a `VirtualCache` promises, as plain tensors that are copied: it knows rows and tokens, but no page or slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# How far a dequantised element may be from what was stored: half a step of 127 of its row's largest, and rounding.
_HALF_STEP = 0.51 / 127
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass
class Plain:
    """K and V of one cache, of all tokens, those behind windows included.

    Attributes:
        windows: per layer; None for full attention.
        dims: per layer, the head sizes of K and of V.
        held: per layer K and V, `[rows, heads, tokens, dim]`; None without tokens.
        floor: the least length to which a crop has to go back.
        recording: whether windows record their past.
        coded: whether the cache stores 8-bit codes.
    """

    windows: list[int | None]
    dims: list[tuple[int, int]]
    dtype: torch.dtype
    coded: bool
    held: list[list[Tensor]] | None = None
    floor: int = 0
    recording: bool = field(default=False)

    @property
    def length(self) -> int:
        """Tokens of every row."""
        return 0 if self.held is None else self.held[0][0].shape[2]

    @property
    def rows(self) -> int:
        """Rows; 0 without tokens."""
        return 0 if self.held is None else self.held[0][0].shape[0]

    @property
    def windowed(self) -> bool:
        return any(window is not None for window in self.windows)

    def copy(self) -> Plain:
        """The same again."""
        held = None if self.held is None else [[side.clone() for side in layer] for layer in self.held]
        return Plain(self.windows, self.dims, self.dtype, self.coded, held, self.floor, self.recording)

    def first_seen(self, layer: int, length: int) -> int:
        """The first token that a query at this length sees."""
        window = self.windows[layer]
        return 0 if window is None else max(0, length - window + 1)

    def seen(self, layer: int, side: int) -> Tensor:
        """What the next query sees."""
        assert self.held is not None
        return self.held[layer][side][:, :, self.first_seen(layer, self.length) :]

    def update(self, new: Sequence[Sequence[Tensor]]) -> None:
        """A forward pass."""
        if not self.recording:
            self.floor = self.length
        if self.held is None:
            self.held = [[side.clone() for side in layer] for layer in new]
            return
        self.held = [
            [torch.cat(pair, dim=2) for pair in zip(*both, strict=True)] for both in zip(self.held, new, strict=True)
        ]

    def crop(self, length: int) -> None:
        """Goes back to this length; how far once more, is not promised."""
        if self.recording or length < self.length:
            self.floor = length
        self._each(lambda side: side[:, :, :length].clone())
        if not length:
            self.held = None

    def take(self, rows: Sequence[int]) -> None:
        """Row i becomes row `rows[i]`."""
        self._each(lambda side: side[list(rows)].clone())

    def write(self, layer: int, side: int, rows: Tensor) -> None:
        """Replaces what the next query sees."""
        self.seen(layer, side).copy_(rows)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.held is not None:
            self.held = [[change(side) for side in layer] for layer in self.held]


def same(found: Tensor, stored: Tensor, *, coded: bool) -> bool:
    """Whether a cache that stored these rows may show those."""
    if found.shape != stored.shape or found.dtype != stored.dtype:
        return False
    if not coded or not stored.numel():
        return torch.equal(found, stored)
    wanted = stored.float()
    largest = wanted.abs().amax(dim=-1, keepdim=True)
    return bool(((found.float() - wanted).abs() <= largest * (_HALF_STEP + _ROUNDING[stored.dtype]) + 1e-6).all())
