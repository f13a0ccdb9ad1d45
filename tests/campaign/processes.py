from __future__ import annotations
import random
from tests.campaign.play import Played
def scenario(rng: random.Random) -> Played:
    return Played()
