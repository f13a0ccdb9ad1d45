"""Random operations."""

from __future__ import annotations

import random

from tests.campaign.play import Played, play
from tests.campaign.scenarios import Drawer, draw_config


def scenario(rng: random.Random, *, operations: int = 60) -> Played:
    """So many operations."""
    config, drawer = draw_config(rng), Drawer(rng)
    return play(config, lambda world: drawer.operations(world, operations))
