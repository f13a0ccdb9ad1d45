"""Log probabilities of many rows are those of each row, computed a few at a time."""

from __future__ import annotations

import pytest
import torch

from vattn.engine.requests import logprobs
from vattn.engine.requests.logprobs import token_logprobs


def test_rows_are_computed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(23, 50, generator=torch.Generator().manual_seed(1))
    tokens, counts = list(range(23)), [row % 5 for row in range(22)] + [-1]
    want = token_logprobs(logits, tokens, counts, str)
    assert [len(report) for report in want[-2:]] == [2, 50]
    sizes = []
    of = torch.Tensor.log_softmax

    def measured(self: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(self.numel())
        return of(self, dim=dim)

    monkeypatch.setattr(torch.Tensor, "log_softmax", measured)
    for most in (500, 499, 1):
        monkeypatch.setattr(logprobs, "_MOST_ELEMENTS", most)
        sizes.clear()
        assert token_logprobs(logits, tokens, counts, str) == want
        assert max(sizes) <= max(50, most)
