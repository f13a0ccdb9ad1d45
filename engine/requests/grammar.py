"""Which tokens an output may go on with, under a grammar: what llguidance says after every token."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vattn.errors import VattnError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class CannotGoOn(VattnError, RuntimeError):
    """What a request asks for lets its output not go on: no token is left that may be next."""


class GrammarError(CannotGoOn):
    """An output cannot go on under its grammar: a limit on the work per token was reached."""


class Grammar:
    """What one output may go on with. The request that owns it tells it every token.

    Attributes:
        allowed: `[vocab_size]`, whether each token may be next; end-of-sequence and stop tokens where the output may
            end. Not to be written to.
        complete: nothing can follow but the end.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: npt.NDArray[np.int64], *, may_end: bool) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._may_end = may_end
        self._stops = np.empty(0, dtype=np.int64)
        self._ending = False  # whether the output may end here
        self.allowed: npt.NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        self.complete = False
        self._look()

    def fork(self, stop_token_ids: Collection[int] = ()) -> Grammar:
        """Another output's, from here on.

        Args:
            stop_token_ids: tokens that end it, too, also those that are no text.
        """
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        if stop_token_ids:
            other._stops = np.array(sorted(stop_token_ids), dtype=np.int64)
            other.allowed = self.allowed.copy()
            other.allowed[other._stops] |= self._ending
        return other

    def accept(self, token_id: int) -> None:
        """Take the output's next token, which was allowed.

        Raises:
            GrammarError: what may come next is too complex to find out.
        """
        self._matcher.consume_token(token_id)
        self._look()

    def _look(self) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        error = self._matcher.get_error()
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        ends = allowed[self._ends].copy()
        allowed[self._ends] = False
        self.complete = not allowed.any()
        if self.complete and not self._matcher.is_accepting():
            error = error or "no token of this model can be next"
        if error:
            raise GrammarError(f"the output cannot go on under structured_outputs: {error}")
        if self._may_end:
            allowed[self._ends] = ends
        self._ending = bool(ends.any())
        allowed[self._stops] |= self._ending
        self.allowed = allowed


@torch.inference_mode()
def exclude(logits: Tensor, rows: Tensor, grammars: Sequence[Grammar]) -> None:
    """Set the logits of tokens that outputs may not go on with to -inf, in place.

    Args:
        logits: `[batch, vocab_size]`.
        rows: `[len(grammars)]`, those of the grammars' outputs.
    """
    excluded = torch.from_numpy(~np.stack([grammar.allowed for grammar in grammars]))
    logits[rows] = logits[rows].masked_fill_(excluded.to(logits.device), -math.inf)
