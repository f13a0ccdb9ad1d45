"""What a layer may ask of attention."""

from __future__ import annotations

import math

import pytest

from vattn.attention import AttentionParams
from vattn.errors import ConfigError


@pytest.mark.parametrize("softcap", [0, -1.0, math.nan, math.inf])
def test_a_softcap_that_bounds_nothing(softcap: float) -> None:
    with pytest.raises(ConfigError, match=f"softcap={softcap}; give a finite number above 0"):
        AttentionParams(softcap=softcap)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_hides_every_key(window: int) -> None:
    """Kernels would make no window of the one, and unwritten rows of the other."""
    with pytest.raises(ConfigError, match=f"window={window} hides every key; give 1 or more"):
        AttentionParams(window=window)
