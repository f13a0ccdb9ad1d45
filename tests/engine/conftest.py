"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest
import torch

# The models are tiny: a second thread costs more than it brings, above all on a machine that others use.
torch.set_num_threads(1)


@pytest.fixture(params=["paged", "virtual"])
def kv(request: pytest.FixtureRequest) -> str:
    """Every test that takes this runs over both backends."""
    backend: str = request.param
    return backend
