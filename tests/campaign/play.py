"""Plays a scenario: operations one after another, with a look at everything between them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import vattn
from tests.campaign.isolation import alive
from tests.campaign.operations import Operation
from tests.campaign.world import Config, Found, Stopped, World

# Is told what is played, up to the operation and the call that are about to be made: the operations, and the script.
Journal = Callable[[Config | None, list[Operation], list[str]], object]
_journal: Journal | None = None

# Operations, or what draws them while it goes.
Source = Callable[[World], Iterable[Operation]]


@dataclass
class Played:
    """What came of a scenario.

    Attributes:
        config: what it was played on; None where it was no list of operations.
        operations: those that were made, the failing one included.
        lines: the script of the calls.
        kind: what was found, without numbers; None if nothing was.
        detail: the same in full.
        code: Python that shows it, after the lines.
        calls: calls on the public interface.
        counts: what came up how often.
    """

    config: Config | None = None
    operations: list[Operation] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    kind: str | None = None
    detail: str = ""
    code: str = ""
    calls: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def plus(self, later: Played) -> Played:
        """A later one, with the counts of both."""
        return replace(later, calls=self.calls + later.calls, counts=self.counts + later.counts)


def tell(journal: Journal) -> None:
    """From now on, in this process, all that is played is told."""
    global _journal
    _journal = journal


def journal(lines: list[str]) -> None:
    """Tells the script of what is played, where that is no list of operations, up to the call about to be made."""
    if _journal is not None:
        _journal(None, [], lines)


def play(config: Config, source: Source) -> Played:
    """Plays operations."""
    alive()
    played = Played(config)
    world = None
    try:
        with World(config) as world:
            played.lines = world.lines
            for i, operation in enumerate(source(world)):
                played.operations.append(operation)
                if _journal is not None:
                    world.before_call = partial(_journal, config, played.operations, world.lines)
                    world.before_call()
                operation.perform(world)
                if i % config.every == 0 and not world.lags:
                    world.check()
            world.check()
    except Stopped:
        played.counts["refused to go on"] += 1
    except vattn.ConfigError as error:
        played.kind, played.detail = "ConfigError", str(error)
    except Found as found:
        played.kind, played.detail, played.code = found.kind, str(found), found.code
    if world is not None:
        played.calls = world.calls
        played.counts += world.counts
    if played.counts["interrupts"]:
        gc.collect()  # what it leaves is not the next one's
    return played
