"""Random operations."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.campaign.play import Played, play
from tests.campaign.scenarios import Drawer, draw_config


def scenario(rng: random.Random, *, operations: int = 120) -> Played:
    """So many operations; in some scenarios the worker lags behind."""
    slow = rng.random() < 0.05
    config, drawer = draw_config(rng, table=slow), Drawer(rng)
    if slow:
        caches = tuple(options | {"overlap": True} for options in config.caches)
        config = replace(config, caches=caches, delay=0.0003)
    return play(config, lambda world: drawer.operations(world, operations))
