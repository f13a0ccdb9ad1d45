"""Log probabilities of tokens, and of the most probable alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one place.

    Attributes:
        logprob: natural logarithm of its probability, from the model's own logits; with `structured_outputs`, those of
            the tokens that keep to the form.
        rank: 1 for the most probable token.
        decoded_token: the token alone as text; None if the tokenizer has none for it, or there is no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# Of logits in float32 at a time: those of a long prompt, all of which may be asked for, would take gigabytes.
_MOST_ELEMENTS = 2**21

DecodeToken = Callable[[int], str | None]


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], decode: DecodeToken
) -> list[dict[int, Logprob]]:
    """The report for each row: its own token first, then the most probable ones in order.

    Args:
        logits: `[len(tokens), vocab_size]`.
        counts: how many of the most probable tokens each row reports, -1 for all.
    """
    vocab_size = logits.shape[1]
    rows = max(1, _MOST_ELEMENTS // vocab_size)
    if len(tokens) > rows:
        parts = ((logits[start:], tokens[start:], counts[start:]) for start in range(0, len(tokens), rows))
        return [
            report
            for part, own_tokens, own_counts in parts
            for report in token_logprobs(part[:rows], own_tokens[:rows], own_counts[:rows], decode)
        ]
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(dim=1) + 1
    counts = [vocab_size if count < 0 else min(count, vocab_size) for count in counts]
    values, indices = logprobs.topk(max(counts), dim=1)
    reports = []
    for token, logprob, rank, count, top, best in zip(
        tokens, own.flatten().tolist(), ranks.tolist(), counts, values.tolist(), indices.tolist(), strict=True
    ):
        report = {token: Logprob(logprob, rank, decode(token))}
        for place in range(count):
            report.setdefault(best[place], Logprob(top[place], place + 1, decode(best[place])))
        reports.append(report)
    return reports
