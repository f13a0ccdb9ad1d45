"""The rows of a step's logits, and which token of which request each of them is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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


@dataclass(frozen=True, eq=False)
class FiniteChunks(Mapping[Request, bool]):
    """Of requests with a chunk in the step: whether the keys and values of all its tokens are finite, by those of the
    last layer. The first look waits for the device.

    A token attends to itself in every layer, whatever the window: if its keys or values are NaN, or its values
    infinite, so is what it brings to the next layer, and its keys and values there are NaN. The last token of a chunk
    is not enough, since windows may hide the wrong ones from it. One token that is sampled from is no chunk: its logits
    say it.

    Attributes:
        tokens: of the step, `[T]` bool on the device; None if there are no chunks.
        chunks: where each request's are among them.
    """

    tokens: Tensor | None = None
    chunks: Mapping[Request, slice] = field(default_factory=dict)

    @cached_property
    def _on_host(self) -> Tensor:
        assert self.tokens is not None
        return self.tokens.cpu()

    def __getitem__(self, request: Request) -> bool:
        place = self.chunks[request]
        return bool(self._on_host[place].all())

    def __iter__(self) -> Iterator[Request]:
        return iter(self.chunks)

    def __len__(self) -> int:
        return len(self.chunks)


@dataclass(frozen=True)
class Forward:
    """What a step computed.

    Attributes:
        rows: one for each newest token that was computed and each token of its draft, in order; and
        logits: of these, `[len(rows), vocab_size]`.
        prompt_rows: prompt positions whose log probabilities are asked for, in order; and
        prompt_logits: of these, `[len(prompt_rows), vocab_size]`.
        finite: for each request that publishes and had a chunk in the step: whether its keys and values are finite. To
            be read once all is done that needs not wait for the device.
    """

    rows: list[Row]
    logits: Tensor
    prompt_rows: list[PromptRow]
    prompt_logits: Tensor
    finite: FiniteChunks = field(default_factory=FiniteChunks)
