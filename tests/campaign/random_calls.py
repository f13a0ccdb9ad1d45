"""Random operations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tests.campaign.operations import Operation
from tests.campaign.play import Played, play
from tests.campaign.scenarios import SELDOM, Drawer, draw_config, is_large
from tests.campaign.world import World


def scenario(rng: random.Random, *, operations: int = 120) -> Played:
    """So many operations; in some scenarios the worker lags behind."""
    slow = rng.random() < 0.15
    config, drawer = draw_config(rng, table=slow), Drawer(rng)
    if not slow or is_large(config.caches):
        return play(config, lambda world: drawer.operations(world, operations))
    caches = tuple(options | {"overlap": True} for options in config.caches)
    config = replace(config, caches=caches, delay=0.0003, every=rng.choice((config.every, SELDOM)))

    def lagging(world: World) -> Iterator[Operation]:
        for _ in range(6):
            yield from drawer.behind(world)
            yield from drawer.operations(world, operations // 6)

    return play(config, lagging)
