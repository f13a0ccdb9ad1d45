"""The campaign: scenarios of every mode, one after another, in a child process; what fails is shrunk to a script."""

from __future__ import annotations

import importlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tests.campaign.isolation import Ended, Send, in_child, set_aside
from tests.campaign.operations import Operation
from tests.campaign.play import Played, play, tell
from tests.campaign.script import script
from tests.campaign.shrink import shrink
from tests.campaign.world import Config


@dataclass(frozen=True)
class Mode:
    """A kind of scenario.

    Attributes:
        module: of this package: its `scenario(rng)` plays one.
        weight: how often it is drawn.
        loads: modules that a scenario imports when it begins, because other modes do without them.
    """

    module: str
    weight: int
    loads: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Imports what its scenarios need."""
        for name in (f"tests.campaign.{self.module}", *self.loads):
            importlib.import_module(name)

    def scenario(self, rng: random.Random) -> Played:
        """Plays one."""
        played: Played = importlib.import_module(f"tests.campaign.{self.module}").scenario(rng)
        return played


MODES = {
    "random": Mode("random_calls", 60),
    "fuzz": Mode("fuzz", 12),
    "interrupts": Mode("interrupts", 4),
    "faults": Mode("driver_faults", 3),
    "processes": Mode("processes", 2),
    "windows": Mode("windows", 20),
    "virtual_cache": Mode("virtual_cache", 12, loads=("vattn.hf.storage",)),
    "engine": Mode("engine", 4, loads=("tests.campaign.engine_reference", "vattn.engine.scheduling.scheduler")),
    "server": Mode("server", 1),
    "attention": Mode("attention", 10),
    "broker": Mode("broker", 2),
    "roles": Mode("roles", 2, loads=("vattn.engine.scheduling.scheduler",)),
    "store": Mode("store", 2),
}
_QUIET = 60.0  # seconds without an end of a scenario: it hangs


@dataclass
class Finding:
    """Something that must not be.

    Attributes:
        scenario: which, of the seed.
        calls: calls that were made until it was found.
    """

    mode: str
    seed: int
    scenario: int
    calls: int
    played: Played

    @property
    def script(self) -> str:
        return script(self.played)

    def __str__(self) -> str:
        return f"{self.played.detail} (mode {self.mode}, seed {self.seed}, scenario {self.scenario}, call {self.calls})"


@dataclass
class Summary:
    """What a campaign did.

    Attributes:
        scenarios: by mode; `calls_of` are their calls on the public interface, and `seconds_of` the time they took.
        counts: what came up how often.
        repeated: findings of a mode and kind that was found before.
    """

    scenarios: Counter[str] = field(default_factory=Counter)
    calls_of: Counter[str] = field(default_factory=Counter)
    seconds_of: dict[str, float] = field(default_factory=dict)
    seconds: float = 0
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    repeated: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def calls(self) -> int:
        """All of them."""
        return self.calls_of.total()

    def __str__(self) -> str:
        modes = ", ".join(
            f"{mode}: {self.calls_of[mode]:,} in {n:,} ({self.seconds_of.get(mode, 0):.0f} s)"
            for mode, n in self.scenarios.most_common()
        )
        counts = ", ".join(f"{n:,} {name}" for name, n in self.counts.most_common())
        rate = self.calls / self.seconds if self.seconds else 0
        return (
            f"{self.calls:,} calls in {self.seconds:.0f} s ({rate:,.0f} a second)\n"
            f"calls in scenarios: {modes}\n{counts}\n"
            f"{len(self.findings)} found"
            + "".join(f"\n{n:,} more: {kind} (mode {mode})" for (mode, kind), n in self.repeated.most_common())
        )


def prepare(modes: Iterable[str]) -> None:
    """Imports what scenarios of these modes need, once for all children."""
    for mode in modes:
        MODES[mode].prepare()
    set_aside()


def draw(seed: int, number: int, modes: Sequence[str]) -> tuple[str, random.Random]:
    """The mode of a scenario, and what it draws from."""
    rng = random.Random(f"{seed}/{number}")
    (mode,) = rng.choices(modes, [MODES[mode].weight for mode in modes])
    return mode, rng


def run(
    seed: int,
    *,
    seconds: float | None = None,
    calls: int | None = None,
    modes: Sequence[str] = tuple(MODES),
    most_findings: int = 1,
    shrink_seconds: float = 60,
    first: int = 0,
    setup: Callable[[], object] | None = None,
    report: Callable[[Finding], object] = lambda found: None,
    summary: Summary | None = None,
) -> Summary:
    """Runs scenarios until the time or the calls are used up, or enough is found.

    Args:
        most_findings: of one mode and kind each; one that was found before is counted.
        first: number of the first scenario.
        setup: is called in the child processes before the first scenario.
        report: is told of each finding, once it is shrunk.
        summary: is filled as the campaign goes, for a caller that ends it with an exception.
    """
    summary = Summary() if summary is None else summary
    begin, number = time.monotonic(), first
    known: set[tuple[str, str]] = set()
    prepare(modes)

    def left() -> bool:
        summary.seconds = time.monotonic() - begin
        return (
            (seconds is None or summary.seconds < seconds)
            and (calls is None or summary.calls < calls)
            and len(summary.findings) < most_findings
        )

    def found(mode: str, kind: str, shown: Callable[[], Played]) -> None:
        if (mode, kind) in known:
            summary.repeated[mode, kind] += 1
            return
        known.add((mode, kind))
        finding = Finding(mode, seed, number - 1, summary.calls, shown())
        summary.findings.append(finding)
        try:
            _shrink(finding, setup, shrink_seconds)
        finally:
            report(finding)

    def work(send: Send) -> None:
        if setup is not None:
            setup()
        for i in range(number, number + 500):
            mode, rng = draw(seed, i, modes)
            began = time.monotonic()
            played = MODES[mode].scenario(rng)
            send((mode, time.monotonic() - began, played))
            if played.kind is not None:
                return  # it may have left something behind
            set_aside()

    while left():
        try:
            for mode, took, played in in_child(work, quiet_seconds=_QUIET):
                summary.scenarios[mode] += 1
                summary.seconds_of[mode] = summary.seconds_of.get(mode, 0) + took
                summary.calls_of[mode] += played.calls
                summary.counts += played.counts
                number += 1
                if played.kind is not None:
                    found(mode, played.kind, partial(replace, played))
                if not left():
                    break
        except Ended as ended:
            mode, rng = draw(seed, number, modes)
            summary.scenarios[mode] += 1
            number += 1
            found(mode, ended.kind, partial(_once_more, mode, rng, setup, ended))
    return summary


def _once_more(mode: str, rng: random.Random, setup: Callable[[], object] | None, ended: Ended) -> Played:
    """A scenario that ended its process, with what it told until then."""
    played = _told(partial(MODES[mode].scenario, rng), setup, _QUIET)
    if played.kind is None:  # it does not come every time
        return replace(played, kind=ended.kind, detail=str(ended))
    return played


def replay(
    config: Config, operations: Sequence[Operation], setup: Callable[[], object] | None, quiet_seconds: float
) -> Played:
    """Plays operations in a child process."""
    return _told(lambda: play(config, lambda world: operations), setup, quiet_seconds)


def _told(playing: Callable[[], Played], setup: Callable[[], object] | None, quiet_seconds: float) -> Played:
    """Plays in a child process; where that ends before it is done, what it told until then."""
    last = Played()

    def work(send: Send) -> None:
        if setup is not None:
            setup()
        tell(lambda config, operations, lines: send(Played(config, operations, lines)))
        send(playing())

    try:
        for told in in_child(work, quiet_seconds=quiet_seconds):
            last = told
    except Ended as ended:
        return replace(last, kind=ended.kind, detail=str(ended))
    return last


def _shrink(found: Finding, setup: Callable[[], object] | None, seconds: float) -> None:
    """Replaces what was played by the least that shows the same."""
    played = found.played
    if played.config is None or not played.operations or seconds <= 0:
        return
    quiet = 5.0

    def again(config: Config, operations: Sequence[Operation]) -> Played:
        return replay(config, operations, setup, quiet)

    def fails(config: Config, operations: Sequence[Operation]) -> bool:
        return again(config, operations).kind == played.kind

    if not any(fails(played.config, played.operations) for _ in range(3)):
        return
    least = shrink(played.config, played.operations, fails, seconds=seconds)
    for _ in range(3):
        if (last := again(*least)).kind == played.kind:
            found.played = replace(last, calls=played.calls)
            return
