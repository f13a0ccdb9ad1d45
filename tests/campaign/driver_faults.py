"""Driver calls that fail: every one of a scenario, one at a time."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.campaign.operations import Operation
from tests.campaign.play import Played, play
from tests.campaign.scenarios import SELDOM, Drawer, Source, crowded, draw_config, is_large, repeats
from tests.campaign.world import Config, Refused, World

_CODES = (2, 999)  # out of memory, unknown


@dataclass(frozen=True)
class Retried(Operation):
    """An operation that is made again where a driver call failed it."""

    inner: Operation

    def perform(self, world: World) -> None:
        call = self.inner.call(world)
        if call is None:
            return
        failed = world.failures
        try:
            value = world.call(call)
        except Refused:
            if world.failures == failed:
                return
            world.counts["driver failures"] += 1
            with contextlib.suppress(Refused):
                again = self.inner.call(world)
                assert again is not None
                self.inner.accept(world, world.call(again))
            return
        self.inner.accept(world, value)

    def moved(self, by: int) -> Operation:
        return replace(self, cache=self.cache + by, inner=self.inner.moved(by))

    def simpler(self) -> Iterator[Operation]:
        for inner in self.inner.simpler():
            yield replace(self, inner=inner)


def scenario(rng: random.Random, *, operations: int = 12, points: int = 30) -> Played:
    """A scenario, and again with each of its driver calls failing: with so many of them at most."""
    config = draw_config(rng, table=True)
    if rng.random() < 0.5:  # failures in the background are those that are noticed late
        config = replace(config, caches=tuple(options | {"overlap": True} for options in config.caches))
    if rng.random() < 0.4:  # what an undo brings back must not be seen by the next request
        zeroing = tuple(options | {"zero_on_free": True} for options in config.caches)
        config = replace(config, zero_on_free=True, caches=zeroing)
    full = rng.random() < (0.4 if config.zero_on_free else 0.1)
    if full:
        config = crowded(config)
    return fail_each(rng, config, Drawer(rng, full=full), operations, points)


def fail_each(rng: random.Random, config: Config, drawer: Source, operations: int, points: int) -> Played:
    """So many operations of a drawer, and again with each of their driver calls failing: with so many of them at most,
    and fewer where worlds are large. In some runs others fail as well.
    """
    delay = 0.0 if is_large(config.caches) else rng.choice((0.0, 0.0, 0.0003))
    config = replace(config, every=rng.choice((1, 3, SELDOM, SELDOM)), delay=delay, books=False)
    calls = 0

    def retried(world: World) -> Iterator[Operation]:
        nonlocal calls
        assert world.table is not None
        before = sum(world.table.calls.values())
        drawn = drawer.operations(world, operations)
        if rng.random() < 0.3:  # what was under way when the last of them left
            drawn = itertools.chain(drawn, drawer.leaving(world))
        for operation in drawn:
            plain = type(operation).perform is not Operation.perform  # no call that could be made again
            yield operation if plain else Retried(operation.cache, operation)
        calls = sum(world.table.calls.values()) - before

    done = play(config, retried)
    if done.kind:
        return done
    made = done.operations
    for nth in sorted(rng.sample(range(1, calls + 1), min(repeats(config, points), calls))):
        more = [rng.randint(1, calls) for _ in range(rng.choice((0, 0, 1, 3)))]
        if rng.random() < 0.3:  # undoing begins with the next call, and is tried twice
            more += [nth + each for each in range(1, rng.choice((2, 4, 6)))]
        elif rng.random() < 0.3:  # what a call brings back may be taken and brought back once more
            more.append(nth + rng.randint(10, 60))
        failing = tuple((each, rng.choice(_CODES)) for each in sorted({nth, *more}))
        done = done.plus(play(replace(config, fail=failing), lambda world: made))
        if done.kind:
            break
    return done
