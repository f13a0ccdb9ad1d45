"""A short campaign, with a budget of calls, so that it does the same on every machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Calls on the public interface, per mode: about a minute in all.
BUDGETS = {"random": 12_000, "fuzz": 3_000, "interrupts": 1_500, "faults": 2_000, "processes": 1_000}


@pytest.mark.parametrize("mode", BUDGETS)
def test_a_short_campaign_finds_nothing(mode: str) -> None:
    command = [sys.executable, "-m", "tests.campaign", "--mode", mode, "--calls", str(BUDGETS[mode]), "--seed", "1"]
    done = subprocess.run(
        [*command, "--shrink-seconds", "30"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "0 found" in done.stdout


def test_a_mutation_is_found() -> None:
    command = [sys.executable, "-m", "tests.campaign.mutations", "no_copy", "--calls", "10000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "wrong rows" in done.stdout
