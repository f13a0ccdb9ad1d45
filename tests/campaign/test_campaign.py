"""A short campaign, with a budget of calls, so that it does the same on every machine."""

from __future__ import annotations

import pytest

from tests.support import scripts
from tests.support.effort import effort
from tests.support.paths import ROOT

# Calls on the public interface, per mode: half a minute in all.
BUDGETS = effort(
    {
        "random": 2_000,
        "fuzz": 700,
        "interrupts": 500,
        "faults": 250,
        "processes": 3_000,
        "windows": 500,
        "virtual_cache": 250,
        "engine": 100,
        "attention": 500,
        "broker": 35,
        "roles": 15,
        "store": 35,
    },
    {
        "random": 60_000,
        "fuzz": 24_000,
        "interrupts": 24_000,
        "faults": 10_000,
        "processes": 240_000,
        "server": 600,
        "windows": 40_000,
        "virtual_cache": 20_000,
        "engine": 12_000,
        "attention": 40_000,
        "broker": 20_000,
        "roles": 2_000,
        "store": 20_000,
    },
)


# In a fork of a process that has imported torch; warnings are no errors to the campaign.
RUN = """
import runpy, sys, warnings
warnings.resetwarnings()
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(module: str, *options: str) -> str:
    done = scripts.run(RUN, module, *options, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow(8)
@pytest.mark.parametrize("mode", BUDGETS)
def test_a_short_campaign_finds_nothing(mode: str) -> None:
    options = ("--mode", mode, "--calls", str(BUDGETS[mode]), "--seed", "1", "--shrink-seconds", "30")
    assert "0 found" in run("tests.campaign", *options)


@pytest.mark.slow(8)
@pytest.mark.parametrize(
    ("mutation", "mode", "seed"),
    [
        ("parked_pages_in_place", "random", 1),
        ("no_origin", "random", 1),
        ("any_length", "fuzz", 1),
        ("no_recovery", "interrupts", 3),
        ("no_copy", "random", 1),
    ],
)
def test_a_mutation_is_found_by_then(mutation: str, mode: str, seed: int) -> None:
    table = run("tests.campaign.mutations", mutation, "--calls", str(BUDGETS[mode]), "--seed", str(seed))
    assert f"| {mode} |" in table
    assert "not found" not in table
