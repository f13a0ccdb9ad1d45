"""Fixtures of the tests with transformers."""

from __future__ import annotations

import pytest

from vattn.pool import shared as shared_pool


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared pools keep no pages for later caches, which would hide a leak."""
    monkeypatch.setattr(shared_pool, "KEPT_BYTES", 0)


@pytest.fixture(autouse=True)
def nothing_leaks(nothing_kept: None, nothing_leaks: None) -> None:
    """The check ends before pages are kept again."""
