"""From logits to tokens: greedy and temperature sampling, each request with its own stream of random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vattn.errors import ConfigError

if TYPE_CHECKING:
    from engine.request import Request


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and when it stops.

    Attributes:
        temperature: 0 for greedy; the logits are divided by it otherwise.
        max_tokens: most output tokens.
        seed: of the request's own random numbers; None to draw one from the engine's seed.
        stop_token_ids: tokens that end the output; the token itself is part of it.
        ignore_eos: go on after the model's end-of-sequence token.

    Raises:
        ConfigError: a value out of its range.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature is {self.temperature}; give 0 (greedy) or a positive number")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; give at least 1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}; give an integer of 64 bits, or None")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """One token per request.

    A drawn token is where one uniform number, from the request's own generator, falls in its cumulative
    distribution. One number per token, so a seed gives the same tokens whatever else is in the batch.

    Args:
        logits: `[len(requests), vocab_size]`.

    Raises:
        FloatingPointError: a row's largest logit is infinite or NaN, so the row says nothing.
    """
    largest, best = logits.max(dim=-1)
    if not torch.isfinite(largest).all():
        raise FloatingPointError("the model's logits are not finite; no token can be taken from them")
    tokens: list[int] = best.tolist()
    drawn = [i for i, request in enumerate(requests) if request.sampling.temperature > 0]
    if not drawn:
        return tokens
    temperatures = torch.tensor([requests[i].sampling.temperature for i in drawn], device=logits.device)
    # The largest logit becomes 0 first: a tiny temperature must not overflow the others.
    scaled = (logits[drawn] - largest[drawn, None]).float() / temperatures[:, None]
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.stack([torch.rand(1, generator=requests[i].generator, dtype=torch.float64) for i in drawn])
    # `right=True` never lands on a token of probability 0; the clamp holds against rounding at the very end.
    threshold = uniform.to(logits.device) * cumulative[:, -1:]
    positions = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
    for i, token in zip(drawn, positions.flatten().tolist(), strict=True):
        tokens[i] = token
    return tokens
