"""Traces: requests one after another, so that their tokens need not be in memory all at once.

The lengths of the paper's traces are log-normal; those of a chat have the means of ShareGPT. All are offline: whoever
waits, waits in the engine's queue, so what is scheduled does not depend on how long a step takes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.harness.traces import TRACES as PAPER

LONGEST = 131_072  # Llama-3.1's positions


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        prompt: token ids.
        output: tokens that it makes.
        more: what its conversation goes on with, when it has ended.
    """

    prompt: list[int]
    output: int
    more: Conversation | None = None


@dataclass
class Conversation:
    """Turns whose prompts begin with all that was said before."""

    lengths: Iterator[tuple[int, int]]
    ids: Iterator[int]

    def turn(self, said: list[int]) -> Turn | None:
        """The next turn after these tokens; None if there is none."""
        following = next(self.lengths, None)
        if following is None:
            return None
        question, output = following
        prompt = said + list(itertools.islice(self.ids, question))
        return Turn(prompt, output, self)


@dataclass(frozen=True)
class Trace:
    """Requests of a kind.

    Attributes:
        prompt, output: mean and deviation of the logarithm of the numbers of tokens.
        turns: of a conversation; 1: requests have nothing in common.
        system: tokens with which all conversations begin.
    """

    name: str
    prompt: tuple[float, float]
    output: tuple[float, float]
    turns: int = 1
    system: int = 0

    @property
    def shares(self) -> bool:
        """Whether prompts have beginnings in common."""
        return self.turns > 1

    def begin(self, seed: int = 0) -> Iterator[Turn]:
        """The first turns of endlessly many conversations; the same in every call."""
        rng = random.Random(seed)
        system = list(range(self.system))
        for number in itertools.count():
            ids = itertools.count(self.system + number * LONGEST)  # no two conversations say the same
            lengths = [self._lengths(rng) for _ in range(self.turns)]
            conversation = Conversation(iter(self._fitting(lengths)), ids)
            turn = conversation.turn(system)
            assert turn is not None
            yield turn if self.shares else Turn(turn.prompt, turn.output)

    def _lengths(self, rng: random.Random) -> tuple[int, int]:
        prompt, output = (math.ceil(rng.lognormvariate(*shape)) for shape in (self.prompt, self.output))
        return min(prompt, LONGEST - output - self.system), output

    def _fitting(self, lengths: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Turns, as long as the conversation is short enough."""
        total = self.system
        for prompt, output in lengths:
            total += prompt + output
            if total > LONGEST:
                return
            yield prompt, output


def _with_mean(tokens: int) -> tuple[float, float]:
    """A log-normal length with this mean, whose logarithm deviates by 1."""
    return math.log(tokens) - 1 / 2, 1.0


LOG_NORMAL = Trace("log-normal", PAPER[2].prompt, PAPER[2].output)
CHAT = Trace("chat", _with_mean(161), _with_mean(338), turns=8, system=1024)
LONG = Trace("long context", PAPER[0].prompt, PAPER[0].output)
