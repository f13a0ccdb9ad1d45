"""Fixtures of the tests with transformers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import target
import torch

from vattn.hf import shared_pool

# The models are tiny: a second thread costs more than it brings, above all on a machine that others use.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def frozen() -> None:
    gc.freeze()  # the objects of torch and transformers are nearly all that a collection looks at


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared pools keep no pages for later caches, which would hide a leak."""
    monkeypatch.setattr(shared_pool, "KEPT_BYTES", 0)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Every test must leave the provider as it found it."""
    gc.collect()
    before = target.usage()
    yield
    gc.collect()
    assert target.usage() == before
