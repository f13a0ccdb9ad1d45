"""What the rows of a token hold, and how they are written and read. Scripts that replay a failure start with this file.

A row is a function of all tokens up to it, of the salt, of the layer and of its side (K or V), in every byte: one that
comes from another request, another position, another layer or another head is not equal by accident.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np
import torch

MASK = (1 << 64) - 1
BRANCHES = (1 << 62, 61, 33, 9, 0)  # where a text stops being the first one
PAGE = 4096
_zeros = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)


def text(stream: int, start: int, end: int) -> list[int]:
    """Tokens `[start, end)` of a text: several texts start alike."""
    branch = BRANCHES[stream]
    return [p % 5 if p < branch else 5 + (p + stream) % 3 for p in range(start, end)]


def chain(tokens: Sequence[int], salt: bytes, before: Sequence[int] = ()) -> list[int]:
    """A number per token that depends on all tokens up to it; `before` are those of the first tokens."""
    state = before[-1] if before else crc32(salt) * 0x9E3779B97F4A7C15 + len(salt) & MASK
    found = list(before)
    for token in tokens[len(found) :]:
        state = (state ^ token + 1) * 0xBF58476D1CE4E5B9 & MASK
        state ^= state >> 29
        found.append(state)
    return found


@cache
def _factors(layer: int, side: int, heads: int, width: int) -> Any:
    drawn = np.random.default_rng((layer, side)).integers(1 << 62, size=(heads, width), dtype=np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


def rows(numbers: Sequence[int], layer: int, side: int, heads: int, width: int) -> Any:
    """The rows of tokens with these numbers, as bytes `[tokens, heads, width]`."""
    wide = np.array(numbers, dtype=np.uint64)[:, None, None] * _factors(layer, side, heads, width)
    return (wide >> np.uint64(56)).astype(np.uint8)


def sides(cache: Any) -> dict[tuple[int, int], Any]:
    """K and V of every layer as bytes, `[slots, tokens, heads, width]`, without those that have no elements."""
    found = {}
    for layer in cache.layers:
        for side, tensor in enumerate(cache.layer(layer)):
            if tensor.numel():
                found[layer, side] = tensor.view(torch.uint8).numpy()
    return found


def writable(array: Any, slot: int, start: int, end: int) -> bool:
    """Whether these rows can be written without a fault: the kernel is asked to, on every page of them."""
    stride = max(1, PAGE // array.strides[1])
    tokens = sorted({*range(start, end, stride), end - 1})
    cells = [array[slot, t, h, :1] for t in tokens for h in range(array.shape[2])]
    try:
        return all(os.readv(_zeros, cells[i : i + 512]) == len(cells[i : i + 512]) for i in range(0, len(cells), 512))
    except OSError:
        return False


def put(cache: Any, slot: int, tokens: Sequence[int], salt: bytes, firsts: dict[int, int]) -> None:
    """Writes the rows of all tokens from `firsts[layer]` on."""
    numbers = chain(tokens, salt)
    for (layer, side), array in sides(cache).items():
        first = firsts[layer]
        if first < len(tokens):
            assert writable(array, slot, first, len(tokens)), f"rows {first} to {len(tokens)} cannot be written"
            array[slot, first : len(tokens)] = rows(numbers[first:], layer, side, *array.shape[2:])


def see(cache: Any, slot: int, tokens: Sequence[int], salt: bytes, firsts: dict[int, int]) -> None:
    """Asserts that the rows of all tokens from `firsts[layer]` on are right."""
    numbers = chain(tokens, salt)
    for (layer, side), array in sides(cache).items():
        first = firsts[layer]
        found = array[slot, first : len(tokens)]
        wrong = (found != rows(numbers[first:], layer, side, *array.shape[2:])).any(axis=(1, 2))
        assert not wrong.any(), f"DEFECT: wrong rows of layer {layer}, {'KV'[side]}: {np.flatnonzero(wrong) + first}"


def flat(tensor: Any) -> Any:
    """A layer's blocks or windows as bytes, `[blocks or windows, tokens, bytes of a token]`."""
    return tensor.flatten(2).view(torch.uint8).numpy()


def write(windows: Any, block: int, start: int, end: int, numbers: Any) -> None:
    """Writes the rows of tokens with these numbers to a block, in every layer."""
    layer = 0
    while True:
        try:
            home = flat(windows.home(layer))
        except IndexError:
            return
        assert writable(home[:, :, None], block, start, end), f"block {block} cannot be written"
        home[block, start:end] = rows(numbers, layer, 0, 1, home.shape[2])[:, 0]
        layer += 1
