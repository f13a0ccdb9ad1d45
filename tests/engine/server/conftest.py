"""One server for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(admin_endpoints=True) as started:
        yield started
        assert started.terminate() == 0
