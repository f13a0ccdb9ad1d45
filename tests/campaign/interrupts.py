"""KeyboardInterrupt in the midst of calls: a call then happened, or did not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import vattn
from tests.campaign.injection import events, interrupted
from tests.campaign.operations import Commit, Operation, Step
from tests.campaign.play import Played, play
from tests.campaign.scenarios import SELDOM, Drawer, Source, draw_config, repeats
from tests.campaign.world import Config, Found, Refused, Stopped, World


@dataclass(frozen=True)
class Interrupted(Operation):
    """An operation that is interrupted at the nth event, if it has so many; see `injection.interrupted`."""

    inner: Operation
    event: str
    nth: int
    how: str

    def perform(self, world: World) -> None:
        call = self.inner.call(world)
        if call is None:
            return
        world.names["interrupted"] = interrupted
        wrapped = f"interrupted(lambda: {call.code}, {self.event!r}, {self.nth}, {self.how!r})"
        try:
            value = world.call(replace(call, code=wrapped))
        except Refused:
            return
        except KeyboardInterrupt:
            world.counts["interrupts"] += 1
            world.lines[-1] = f"try: {world.lines[-1]}\nexcept KeyboardInterrupt: pass"
            self._settle(world, bool(call.into))
            return
        self.inner.accept(world, value)

    def _settle(self, world: World, gives_slot: bool) -> None:
        """Finds out whether the call happened."""
        if self.inner.settle(world):
            return
        try:
            now = [world.lengths(each) for each in world.caches]
        except vattn.VattnError as error:
            raise Stopped from error  # a pool that refuses to go on keeps its promise
        if now == [each.model.lengths() for each in world.caches]:
            # Nobody can tell whether these happened, so only what both would leave is promised.
            if isinstance(self.inner, Commit) or (isinstance(self.inner, Step) and self.inner.keeps_lengths(world)):
                self.inner.accept(world, None)
            return
        if gives_slot:
            raise Found(
                f"an interrupted {type(self.inner).__name__} keeps a slot",
                f"{now}",
                f"print('DEFECT: a slot that nobody knows of', {world.caches[self.cache].name}.page_map())",
            )
        self.inner.accept(world, None)

    def moved(self, by: int) -> Operation:
        return replace(self, cache=self.cache + by, inner=self.inner.moved(by))

    def simpler(self) -> Iterator[Operation]:
        for inner in self.inner.simpler():
            yield replace(self, inner=inner)
        if self.how == "signal":
            yield replace(self, how="raise")


def scenario(rng: random.Random, *, points: int = 40) -> Played:
    """A few operations, and one that is interrupted: at so many places, each in a world of its own."""
    config = replace(draw_config(rng), own=rng.random() < 0.3, every=rng.choice((1, 1, SELDOM)), books=False)
    return interrupt_one(rng, config, Drawer(rng), points=points)


def interrupt_one(rng: random.Random, config: Config, drawer: Source, *, points: int) -> Played:
    """Operations of a drawer, and one of them interrupted at so many places, each in a world of its own.

    Args:
        points: at most; fewer where worlds are large.
    """
    first = play(config, lambda world: drawer.operations(world, rng.randint(3, 16)))
    if first.kind:
        return first
    count = 0

    def last(world: World) -> Iterator[Operation]:
        nonlocal count
        yield from first.operations
        before, target = drawer.target(world)
        count = len(first.operations) + len(before)
        yield from before
        yield target
        yield from drawer.operations(world, 3)

    whole = play(config, last)
    if whole.kind or len(whole.operations) <= count:
        return first.plus(whole)
    prefix, target, suffix = whole.operations[:count], whole.operations[count], whole.operations[count + 1 :]
    event = rng.choice(("call", "check"))

    def at(nth: int) -> Played:
        how = rng.choice(("raise", "signal"))
        interrupt = Interrupted(target.cache, target, event, nth, how)
        return play(config, lambda world: [*prefix, interrupt, *suffix])

    done = first.plus(whole).plus(at(1 << 60))
    places = events()
    for nth in sorted(rng.sample(range(1, places + 1), min(repeats(config, points), places))):
        done = done.plus(at(nth))
        if done.kind:
            break
    return done
