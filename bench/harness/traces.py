"""The paper's traces: log-normal lengths of prompts and outputs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SEED = 0


@dataclass(frozen=True)
class Trace:
    """Log-normal numbers of prompt and output tokens, each given by the mean and deviation of the logarithm."""

    name: str
    requests: int
    prompt: tuple[float, float]
    output: tuple[float, float]

    def lengths(self, requests: int) -> tuple[list[int], int]:
        """Tokens in the cache of each request at a random moment of its decode; and the final length of the longest."""
        draw = random.Random(SEED)
        lengths, longest = [], 0
        for _ in range(requests):
            prompt, output = (max(1, math.ceil(draw.lognormvariate(*shape))) for shape in (self.prompt, self.output))
            lengths.append(prompt + draw.randint(1, output))
            longest = max(longest, prompt + output)
        return lengths, longest


TRACES = (
    Trace("long offline", 427, (11.35, 0.24), (5.79, 0.72)),
    Trace("long online", 10_111, (10.28, 0.18), (5.70, 0.61)),
    Trace("sample", 2_895, (9.08, 0.51), (5.87, 0.61)),
)
