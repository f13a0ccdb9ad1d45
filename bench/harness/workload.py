"""Requests with random prompts, as the peers of `bench.peers` and the engine take them."""

from __future__ import annotations

import random

from bench.peers import Workload


def make_requests(count: int, lengths: tuple[int, int], vocabulary: int) -> Workload:
    """Random prompts of lengths in `lengths`, with outputs of 16 to 128 tokens; the same in every run."""
    rng = random.Random(0)
    return [
        {
            "prompt_token_ids": [rng.randrange(vocabulary) for _ in range(rng.randint(*lengths))],
            "max_tokens": rng.randint(16, 128),
        }
        for _ in range(count)
    ]
