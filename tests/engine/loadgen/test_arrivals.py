"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vattn.engine.loadgen.arrivals import arrival_times
from vattn.errors import ConfigError


def gaps(times: list[float]) -> np.ndarray:
    return np.diff([0.0, *times])


def test_all_at_once() -> None:
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]


def test_a_steady_beat() -> None:
    assert arrival_times(4, 2.0, math.inf) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_of_their_distribution(burstiness: float) -> None:
    times = arrival_times(20000, 10.0, burstiness, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000)
    # A gamma distribution of this shape has a standard deviation of mean / sqrt(shape).
    assert gaps(times).std() == pytest.approx(0.1 / math.sqrt(burstiness), rel=0.05)


def test_the_seed_decides() -> None:
    assert arrival_times(5, 1.0, seed=3) == arrival_times(5, 1.0, seed=3) != arrival_times(5, 1.0, seed=4)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, -2.0)])
def test_what_is_no_rate(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match="give a number above 0"):
        arrival_times(3, rate, burstiness)


@pytest.mark.parametrize("rate", [1.0, math.inf])
def test_what_is_no_seed(rate: float) -> None:
    with pytest.raises(ConfigError, match="seed is -1; give a whole number, at least 0"):
        arrival_times(3, rate, seed=-1)
