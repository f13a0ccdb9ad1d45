"""The rows of a step's logits, and which token of which request each of them is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..requests.request import Request


class Row(NamedTuple):
    """Logits to sample from: those of a request's newest token, or of a token of its draft.

    Attributes:
        ahead: 0 for the newest token, 1 for the first of the draft, and so on.
    """

    request: Request
    ahead: int = 0


class PromptRow(NamedTuple):
    """Logits after the prompt token at `position`, which tell the probability of the next one."""

    request: Request
    position: int


@dataclass(frozen=True)
class Forward:
    """What a step computed.

    Attributes:
        rows: one for each newest token that was computed and each token of its draft, in order; and
        logits: of these, `[len(rows), vocab_size]`.
        prompt_rows: prompt positions whose log probabilities are asked for, in order; and
        prompt_logits: of these, `[len(prompt_rows), vocab_size]`.
        finite: for each request that publishes and had a chunk in the step: whether its keys and values are finite.
    """

    rows: list[Row]
    logits: Tensor
    prompt_rows: list[PromptRow]
    prompt_logits: Tensor
    finite: Mapping[Request, bool] = field(default_factory=dict)
