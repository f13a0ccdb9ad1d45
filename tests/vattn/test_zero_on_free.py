"""A native pool with `zero_on_free`: what is freed is zero before anybody has it, on any provider."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import target

from vattn import _native, drivers

PAGES = 4


class World:
    """Two slots of `PAGES` columns in one lane."""

    def __init__(self, zero_on_free: bool) -> None:
        page = drivers.find(target.DEVICE).page_sizes[0]
        driver = drivers.open_driver(target.DEVICE, page)
        self.page_words = page // 8
        self.pool = _native.PagePool(page, PAGES, zero_on_free=zero_on_free)
        self.space = _native.AddressSpace(driver.native, self.pool, tensors=1, slots=2, runs=1, run_pages=PAGES)
        self.mapper = _native.Mapper(driver.native, self.pool)
        # On both providers memory is the host's, so that a pointer reads it.
        self.base = self.space.tensor(0, 1, 0).data_ptr()

    def run(self, *decide: Callable[[Any], object]) -> None:
        transaction = _native.Transaction()
        for part in decide:
            part(transaction)
        self.mapper.wait(self.mapper.submit(transaction))
        assert transaction.status == _native.Status.DONE

    def words(self, slot: int, column: int) -> Any:
        where = self.base + (slot * PAGES + column) * self.page_words * 8
        return (ctypes.c_uint64 * self.page_words).from_address(where)

    def close(self) -> None:
        for slot in (0, 1):
            self.run(lambda t, slot=slot: self.space.shrink(t, slot, self.space.columns(slot)))
        self.run(lambda t: self.pool.release_free(t, PAGES))
        self.mapper.stop()


@pytest.mark.parametrize("zero_on_free", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_pages_that_another_slot_gets(zero_on_free: bool, at_once: bool) -> None:
    world = World(zero_on_free)
    assert world.pool.zero_on_free == zero_on_free
    world.run(lambda t: world.space.grow(t, 0, PAGES))
    for column in range(PAGES):
        world.words(0, column)[:] = [column + 1] * world.page_words
    shrink, grow = (lambda t: world.space.shrink(t, 0, PAGES)), (lambda t: world.space.grow(t, 1, PAGES))
    if at_once:
        world.run(shrink, grow)
    else:
        world.run(shrink)
        world.run(grow)
    found = {value for column in range(PAGES) for value in world.words(1, column)}
    assert found == ({0} if zero_on_free else set(range(1, PAGES + 1)))
    world.close()


def test_pages_that_somebody_holds_are_left_alone_until_they_are_let_go() -> None:
    world = World(True)
    world.run(lambda t: world.space.grow(t, 0, 2))
    for column in (0, 1):
        world.words(0, column)[:] = [7] * world.page_words
    held = world.space.pages(0, 0, 1)
    world.run(lambda t: world.pool.hold(t, held), lambda t: world.space.shrink(t, 0, 2))
    world.run(lambda t: world.space.attach(t, 1, [held]))
    assert set(world.words(1, 0)) == {7}
    world.run(lambda t: world.space.shrink(t, 1, 1))
    world.run(lambda t: world.pool.let_go(t, held))
    assert world.pool.counts().taken == 0
    world.run(lambda t: world.space.grow(t, 1, 2))
    assert set(world.words(1, 0)) == set(world.words(1, 1)) == {0}
    world.close()
