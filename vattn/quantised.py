"""Keys and values in 8 bits: codes with a scale per token and head.

A row of a head is stored as whole numbers from -127 to 127, and as what they are multiples of: its largest magnitude
over 127, in the model's element type (float32 for float16, whose range is too small for it). Codes are in tensor groups
like those of the values they stand for. Scales are in groups of their own element type, one per window, as every token
block has to back both; and as one layer with a row for the scales of all, since rows of a few bytes would make a page,
and with it every block, cover thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vattn.groups import TensorGroup

# What a cache stores: what the model computes, or codes and scales.
KVCacheDtype = Literal["auto", "int8"]

_LARGEST = 127


@dataclass(frozen=True)
class Scales:
    """Where the scales of a layer are: columns of the only head of layer `layer`, a key's first, then a value's.

    Values without elements have no columns.
    """

    layer: int
    keys: slice
    values: slice

    def views(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """The scales of keys and of values, shaped like heads of one element, as codes are like heads of many.

        Args:
            stored: layer `layer`, `[slots, max_context_len, 1, columns]`.

        Returns:
            Views `[slots, max_context_len, num_kv_heads, 1]`; `[..., 0]` for values without elements.
        """
        columns = stored[:, :, 0, :, None]
        keys = columns[:, :, self.keys]
        return keys, columns[:, :, self.values] if self.values.start < self.values.stop else keys[..., :0]


def quantised_groups(groups: Sequence[TensorGroup], dtype: torch.dtype) -> tuple[list[TensorGroup], dict[int, Scales]]:
    """Groups that hold the codes and the scales of `groups`, and where the scales of each of their layers are.

    Args:
        dtype: of the values.

    Returns:
        The groups, of which those of scales have layer indices above all others, and no values.
    """
    codes = [replace(group, dtype=torch.int8) for group in groups]
    places: dict[int, Scales] = {}
    scales = []
    layer = 1 + max(index for group in groups for index in group.indices)
    for window in dict.fromkeys(group.sliding_window for group in groups):
        column = 0
        for group in groups:
            if group.sliding_window == window:
                per_side = [group.num_kv_heads if head_dim else 0 for head_dim in group.head_dims]
                for index in group.indices:
                    first, second = column + per_side[0], column + sum(per_side)
                    places[index] = Scales(layer, slice(column, first), slice(first, second))
                    column = second
        # A power of two, so that as many whole rows as possible fill a page.
        columns = 1 << (column - 1).bit_length()
        scales.append(
            TensorGroup(
                layers=[layer],
                num_kv_heads=1,
                head_dim=columns,
                v_head_dim=0,
                dtype=_scale_dtype(dtype),
                sliding_window=window,
            )
        )
        layer += 1
    return codes + scales, places


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 of `rows` `[..., head_dim]`, and their scales `[..., 1]`.

    A row with an element that is not finite comes back as NaN, which is noticed where the row is used.
    """
    dtype = _scale_dtype(rows.dtype)
    if not rows.shape[-1]:
        return rows.to(torch.int8), rows.to(dtype)
    exact = rows.float()
    scales = (exact.abs().amax(dim=-1, keepdim=True) / _LARGEST).to(dtype).clamp_min(torch.finfo(dtype).tiny)
    # The scale is rounded, so that the largest can be a little over.
    codes = (exact / scales.float()).round_().clamp_(-_LARGEST, _LARGEST)
    return codes.to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """What codes `[..., head_dim]` and scales `[..., 1]` stand for, in `out`, of the type that was quantised.

    Two passes: measured over 2048 rows of 8 heads of 128 in float32, 244 us, where a product of both types takes 378
    with an `out`, and 8200 without.
    """
    return out.copy_(codes).mul_(scales)


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype
