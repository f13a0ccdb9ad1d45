"""The stub keeps the contract of vmm.h, so that what runs over it may run over CUDA."""

from __future__ import annotations

from tests.support.vmm_contract import VmmContract


class TestStub(VmmContract):
    """With the fixture `vmm` of conftest.py."""
