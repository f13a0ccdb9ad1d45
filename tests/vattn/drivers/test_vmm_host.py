"""The host provider keeps the contract of vmm.h, with pages of every size."""

from __future__ import annotations

import pytest
from vmm_contract import Provider, VmmContract

from vattn import _native


class TestHost(VmmContract):
    @pytest.fixture(params=[2**12, 2**16, 2**21])
    def vmm(self, request: pytest.FixtureRequest) -> Provider:
        return Provider(_native.host_table(), _native.host_prop(request.param), request.param)
