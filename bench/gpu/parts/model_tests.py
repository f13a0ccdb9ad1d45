"""`VirtualCache` and the engine on the device, token for token."""

from __future__ import annotations

from bench.gpu import device_tests
from bench.harness.report import Report

ABOUT = "tests/gpu: models over VirtualCache and over the engine, token for token"
RANK = 7
SECONDS = 70


def run(quick: bool) -> Report:
    return device_tests.run(("tests/gpu/test_models_device.py",), at_once=6)
