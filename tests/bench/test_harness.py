"""Goals are judged; other load on the machine is noticed, and voids times."""

import collections
import itertools
import os
import subprocess
import sys
from functools import partial

import pytest

from bench.harness import instructions, timing
from bench.harness.instructions import CannotCount, Counter
from bench.harness.pools import serving_pool
from bench.harness.report import Goal, Report
from bench.harness.timing import LoadMeter, turns
from vattn import PagePool
from vattn.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "relation", "bound", "met"),
    [(1.0, "<=", 1.0, True), (1.1, "<=", 1.0, False), (0.9, ">=", 1.0, False), (2.0, "==", 2.0, True)],
)
def test_goals_are_judged(value: float, relation: str, bound: float, met: bool) -> None:
    goal = Goal("x", value, relation, bound)  # type: ignore[arg-type]
    assert goal.met is met
    assert ("NOT met" in str(goal)) is not met


def test_other_processes_are_foreign_until_they_turn_out_to_be_children() -> None:
    """Only lower bounds on what is foreign, and upper ones by the process's own clock: the machine may be busy."""
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    load = LoadMeter()
    own = timing._own_seconds()
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert load.foreign_seconds() > 0.4
        assert load.foreign_cores() > 0
        assert timing._own_seconds() - own < 0.4
        child.communicate(b"\n")
    assert timing._own_seconds() - own > 0.4


@pytest.mark.parametrize(("timed", "cores", "contended"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_only_times_are_void_on_a_busy_machine(timed: bool, cores: float, contended: bool) -> None:
    assert Report(parameters={}, figures=[], goals=[], timed=timed).contended(cores) is contended


def test_instructions_are_counted_or_it_says_why_not() -> None:
    """Most virtual machines have no counter."""
    try:
        counter = Counter()
    except CannotCount as error:
        assert str(error).startswith("perf_event_open: ")
        return
    few, many = (counter.count(partial(sum, range(n))) for n in (1000, 100_000))
    counter.close()
    assert 0 < 10 * few < many


def test_a_processor_whose_call_is_not_known_has_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions.platform, "machine", lambda: "another")
    with pytest.raises(CannotCount, match="another"):
        Counter()


def test_a_broker_serves_within_its_context_and_ends_with_it() -> None:
    before = dict(os.environ)
    own = timing._own_seconds()
    with serving_pool(2**20) as name:
        pool = PagePool.connect(name, page_size=4096)
        assert pool.budget == 2**20
        pool.close()
    assert dict(os.environ) == before
    assert timing._own_seconds() > own, "the broker's time is the benchmark's own"
    with pytest.raises(ConfigError, match="no broker serves"):
        PagePool.connect(name, page_size=4096)


@pytest.mark.parametrize("count", range(1, 8))
def test_sides_take_turns_evenly(count: int) -> None:
    """Each comes first as often as any other, and follows each other one as often."""
    rounds = count * (1 + count % 2)
    orders = [turns(range(count), number) for number in range(-rounds, rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    firsts = collections.Counter(order[0] for order in orders)
    assert len(firsts) == count
    assert len(set(firsts.values())) == 1
    pairs = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) <= 1
