"""The contract of vmm.h on the real driver, and caches over it."""

from __future__ import annotations

from bench.gpu import device_tests
from bench.harness.report import Report

ABOUT = "tests/gpu: the contract on the real driver, caches, fences"
RANK = 2
SECONDS = 75


def run(quick: bool) -> Report:
    return device_tests.run(("tests/gpu/test_vmm_device.py", "tests/gpu/test_cache_device.py"))
