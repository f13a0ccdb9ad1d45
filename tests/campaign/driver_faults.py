"""Driver calls that fail: every one of a scenario, one at a time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.campaign.operations import Operation
from tests.campaign.play import Played, play
from tests.campaign.scenarios import Drawer, draw_config
from tests.campaign.world import Refused, World

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


def scenario(rng: random.Random, *, operations: int = 12, points: int = 60) -> Played:
    """A scenario, and again with each of its driver calls failing: with so many of them at most."""
    config = replace(draw_config(rng, table=True), every=1)
    drawer = Drawer(rng)
    calls = 0

    def drawn(world: World) -> Iterator[Operation]:
        nonlocal calls
        assert world.table is not None
        before = sum(world.table.calls.values())
        for _ in range(operations):
            operation = drawer.draw(world)
            yield Retried(operation.cache, operation)
        calls = sum(world.table.calls.values()) - before

    done = play(config, drawn)
    if done.kind:
        return done
    made = done.operations
    for nth in sorted(rng.sample(range(1, calls + 1), min(points, calls))):
        failing = replace(config, fail=(nth, rng.choice(_CODES)))
        done = done.plus(play(failing, lambda world: made))
        if done.kind:
            break
    return done
