"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np

from vattn.errors import ConfigError

from ..checks import checked_whole


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start to each request.

    Args:
        rate: requests per second on average; infinite for all at once.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process; below 1 comes in bursts; above
            1 is more even, and infinite is a steady beat.

    Raises:
        ConfigError: a rate or burstiness that is not positive, or a seed below 0.
    """
    checked_whole("seed", seed, 0)
    for name, value in (("request_rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise ConfigError(f"{name} is {value}; give a number above 0, or inf")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
        # The whole takes the time that was asked for, however few requests there are.
        if gaps.sum() > 0:
            gaps *= count / rate / gaps.sum()
    return [float(time) for time in np.cumsum(gaps)]
