"""`VirtualCache`, the engine and the server on the device, token for token."""

from __future__ import annotations

from bench.gpu import device_tests
from bench.harness.report import Report

ABOUT = "tests/gpu: models, token for token"
RANK = 7
SECONDS = 110


def run(quick: bool) -> Report:
    return device_tests.run(("tests/gpu/test_models_device.py", "tests/gpu/test_serving_device.py"), at_once=6)
