"""Decode steps as CUDA graphs, and the kernels against float64 on every side."""

from __future__ import annotations

from bench.gpu import device_tests
from bench.harness.report import Report

ABOUT = "tests/gpu: graphs, kernels on every side"
RANK = 6
SECONDS = 140


def run(quick: bool) -> Report:
    return device_tests.run(("tests/gpu/test_graphs_device.py", "tests/gpu/test_kernels_device.py"), at_once=6)
