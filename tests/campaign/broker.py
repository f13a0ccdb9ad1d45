"""A broker and three borrowers that are stopped and killed at any instant, beside a process that lies.

Bursts of calls and events, after each of which all is quiet: then the books of all agree with each other and with the
kernel. In the end all memory is free again.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.campaign.borrowing import PAGE, TAGS, Borrowing
from tests.campaign.forked import PATIENCE, Forked, Wrong, play_out
from tests.campaign.play import Played
from tests.support import malformed
from vattn.broker import books, borrower, server
from vattn.broker.control import Control
from vattn.broker.notes import Notes
from vattn.broker.places import FOLDER_VARIABLE, socket_path
from vattn.broker.server import Broker
from vattn.broker.wire import VERSION, encode
from vattn.errors import ConfigError, VattnError
from vattn.pool import lent

NAME = "campaign"
PAGES = 256
LABELS = ("one", "two", "three")
BURSTS = 4


def scenario(rng: random.Random) -> Played:
    """Some bursts."""
    return play(rng.randrange(1 << 30))


def play(seed: int) -> Played:
    """The scenario of a seed; what it does is drawn from that, and how far which process is by then is not."""
    played = Played(lines=["from tests.campaign import broker", f"print(broker.play({seed}).detail)"])
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        os.chmod(folder, 0o700)
        patch.setenv(FOLDER_VARIABLE, folder)
        if rng.random() < 0.8:
            hurry(patch)
        play_out(World(rng, played.counts), played)
    return played


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Less patience, so that more happens in a second."""
    for module, name, seconds in (
        (books, "PATIENCE", 0.2),
        (books, "REST", 0.02),
        (borrower, "_HEARTBEAT", 0.1),
        (borrower, "_AGAIN", 0.02),
        (borrower, "_BUSY", 0.1),
        (borrower, "_STANDING", 0.1),
        (server, "_AUDIT", 0.1),
        (server, "_NOTING", 0.02),
        (lent, "_WAIT", 0.5),
    ):
        patch.setattr(module, name, seconds)


class World:
    """The processes of a scenario."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self.calls = 0
        self._rng, self._counts = rng, counts
        self._tags = itertools.cycle(TAGS)
        self._liars: list[Forked] = []
        self._borrowers: dict[str, Forked] = {}
        self._broker = self._serve()
        for label in LABELS:
            self._borrowers[label] = self._borrow(label)

    def play(self) -> None:
        """Everything."""
        for number in range(BURSTS):
            self._burst()
            self._calm(all_of_it=number == BURSTS - 1 or self._rng.random() < 0.3)
        self._end()

    def close(self) -> None:
        """Kills everything."""
        for each in (*self._borrowers.values(), *self._liars, self._broker):
            with contextlib.suppress(Wrong):
                each.forget()

    # Processes

    def _serve(self) -> Forked:
        after = self._rng.randrange(50, 4000) if self._rng.random() < 0.3 else None
        slowness = self._rng.choice((0.0, 0.0, 0.03))
        made = Forked("the broker", partial(serve, NAME, PAGES * PAGE, slowness), die_after=after)
        return made if made.answer() else self._serve()

    def _borrow(self, label: str) -> Forked:
        after = self._rng.randrange(200, 60_000) if self._rng.random() < 0.2 else None
        work = partial(_borrow, label, next(self._tags), self._rng.randrange(1 << 30))
        return Forked("a borrower", work, die_after=after)

    def _kill_borrower(self, label: str) -> None:
        self._borrowers[label].forget()
        self._borrowers[label] = self._borrow(label)
        self._counts["kills of borrowers"] += 1

    def _kill_broker_beside(self, stopped: Forked) -> None:
        """One borrower is late to join the next broker, and has what it had."""
        stopped.signal(signal.SIGSTOP)
        self._kill_broker()
        self._sleep(0.2)
        stopped.signal(signal.SIGCONT)

    def _kill_broker(self) -> None:
        self._broker.forget()
        self._counts["kills of brokers"] += 1
        if self._rng.random() < 0.5:
            self._sleep(0.1)
        self._broker = self._serve()

    def _lie(self) -> None:
        count, seed = self._rng.choice((20, 100, 400)), self._rng.randrange(1 << 30)
        lie = _lie if self._rng.random() < 0.7 else _join_often
        self._liars.append(Forked("a liar", partial(lie, count, seed)))
        self.calls += count
        self._counts["messages of liars"] += count

    def _stop(self, process: Forked) -> None:
        process.signal(signal.SIGSTOP)
        self._sleep(0.4)
        process.signal(signal.SIGCONT)
        self._counts["stops"] += 1

    def _sleep(self, seconds: float) -> None:
        time.sleep(self._rng.random() * seconds)

    # Bursts

    def _burst(self) -> None:
        """All play, and are disturbed meanwhile."""
        rng = self._rng
        self._await_all()
        for each in self._borrowers.values():
            each.tell("play", rng.randrange(10, 80))
        for _ in range(rng.randrange(1, 8)):
            self._sleep(0.05)
            label, most = rng.choice(LABELS), rng.randrange(PAGES // 4, PAGES + 1) * PAGE
            name = rng.choice((label, f"{label}#2"))
            least = rng.choice((None, 0, PAGES // 8 * PAGE))
            events = (
                (3, partial(self._kill_borrower, label)),
                (1, self._kill_broker),
                (1, partial(self._kill_broker_beside, self._borrowers[label])),
                (1, partial(self._stop, self._borrowers[label])),
                (0.5, partial(self._stop, self._broker)),
                (3, partial(self._ask, "limit", name=name, at_least=least, at_most=most)),
                (3, partial(self._ask, "reclaim", name=rng.choice((None, name)), stage=rng.choice(_STAGES))),
                (1, partial(self._ask, "top")),
                (1, partial(self._ask, "check")),
                (1, self._lie),
            )
            (event,) = rng.choices([event for _, event in events], [weight for weight, _ in events])
            event()
            self.calls += 1

    def _await_all(self) -> None:
        """Until all have answered; others come for those that have killed themselves."""
        while True:
            for label, each in self._borrowers.items():
                calls, found = each.answer(self._replace_broker) or (0, 0)
                self.calls += calls
                self._counts["tokens that others had computed"] += found
                if not each.lives():
                    each.check()
                    self._kill_borrower(label)
            if not any(each.waiting for each in self._borrowers.values()):
                return

    def _replace_broker(self) -> None:
        if not self._broker.lives():
            self._broker.check()
            self._kill_broker()

    # Quiet

    def _calm(self, *, all_of_it: bool) -> None:
        """Waits until all are quiet, and compares their books; perhaps that one borrower can have all that there is."""
        for each in self._liars:
            each.answer()
            self._ask("top")
            each.forget()
        self._liars.clear()
        self._await_all()
        if not self._wait(self._all_joined):
            if self._all_live():
                raise Wrong(f"borrowers do not join again: {self._ask('top')}\n{self._said()}")
            return  # somebody has killed itself meanwhile
        self._see_books()
        self._tell_all("check")
        if all_of_it:
            self._tell_all("let go")
            self._see_books()
            self._take_all()
        self._see_books()

    def _all_joined(self) -> bool:
        top = self._ask("top")
        # A pool that was dropped is there until it is collected.
        return top is not None and {each["name"].partition("#")[0] for each in _connected(top)} >= set(LABELS)

    def _all_live(self) -> bool:
        return all(each.lives() for each in (self._broker, *self._borrowers.values()))

    def _tell_all(self, *what: Any) -> None:
        for each in self._borrowers.values():
            each.tell(*what)
        for each in self._borrowers.values():
            each.answer(self._replace_broker)

    def _see_books(self) -> None:
        """Where all live: what is lent is no more than there is, and what is found no more than is lent."""
        top, check = self._ask("top"), self._ask("check")
        if top is None or check is None or not self._all_live():
            return
        if problems := check["problems"]:
            raise Wrong(f"the broker's check: {problems}")
        # A broker learns late of what processes have left that ended while there was another one.
        if sum(each["lease"] for each in top["borrowers"]) > top["budget"] or top["free"] < -top["kept"]:
            raise Wrong(f"more is lent than there is: {top}")

    def _take_all(self) -> None:
        """Memory that nobody has is anybody's."""
        chosen = self._rng.choice(list(self._borrowers.values()))
        chosen.tell("name")
        name = chosen.answer()
        top = self._ask("limit", name=name, at_least=None, at_most=PAGES * PAGE) if name else None
        mine = next((each for each in _connected(top or {"borrowers": []}) if each["name"] == name), None)
        if top is None or mine is None:
            return  # somebody has killed itself meanwhile
        # Who is lost has a pool that it has left, while the broker was dead perhaps: its lease ends with the process.
        others = sum(max(each["lease"], each["found"]) for each in top["borrowers"] if each["lost"])
        pages = min(mine["at_most"], top["budget"] - others) // PAGE
        end = time.monotonic() + PATIENCE
        while True:
            chosen.tell("take", pages)
            if chosen.answer() is not False or not self._all_live():
                self._counts["all of the memory taken"] += 1
                return
            if time.monotonic() > end:
                raise Wrong(
                    f"memory that nobody has is not to be had: {pages} pages, {self._ask('top')}\n{self._said()}"
                )

    def _end(self) -> None:
        """All leave, or are killed; then everything is free, and the broker ends as it is asked to."""
        self._replace_broker()
        for each in self._borrowers.values():
            if self._rng.random() < 0.5:
                each.tell("leave")
                each.answer()
        for each in self._borrowers.values():
            each.kill()
        if not self._wait(self._all_free) and self._broker.lives():
            raise Wrong(f"memory is lost: {self._ask('top')}")
        if not self._broker.lives():
            return
        if problems := (self._ask("check") or {"problems": []})["problems"]:
            raise Wrong(f"the broker's check: {problems}")
        if (status := self._broker.kill(signal.SIGTERM)) not in (0, -signal.SIGKILL):
            raise Wrong(f"the broker ends: with {status}\n{self._broker.said()}")
        if status == 0 and socket_path(NAME).exists():
            raise Wrong("the broker leaves its socket:")

    def _all_free(self) -> bool:
        top = self._ask("reclaim", name=None, stage="cached")  # what has been published outlives its process
        return top is not None and top["free"] == PAGES * PAGE

    def _ask(self, kind: str, **fields: object) -> dict[str, Any] | None:
        return ask(self._broker, kind, **fields)

    def _wait(self, condition: Any) -> bool:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end or not self._broker.lives():
                return False
            time.sleep(0.002)
        return True

    def _said(self) -> str:
        return "\n".join(each.said() for each in (self._broker, *self._borrowers.values()))


_STAGES = ("free", "parked", "cached")


def _connected(top: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in top["borrowers"] if not each["lost"]]


def ask(broker: Forked, kind: str, **fields: object) -> dict[str, Any] | None:
    """What a broker answers; None if it refuses, or has killed itself."""
    try:
        with contextlib.closing(Control(NAME, seconds=PATIENCE)) as control:
            return control.ask(kind, **fields)
    except ConfigError:
        return None
    except VattnError as error:
        if not broker.ends():
            raise Wrong(f"the broker does not answer: {kind}: {error}\n{broker.said()}") from error
        return None


def serve(name: str, budget: int, slowness: float, pipe: Connection) -> None:
    """Is a broker, whose notes take so many seconds each."""
    if slowness:  # of the disk
        replace = Notes._replace

        def slowly(self: Notes, text: bytes) -> None:
            time.sleep(slowness)
            replace(self, text)

        Notes._replace = slowly  # type: ignore[method-assign]
    broker = Broker(name, budget)
    signal.signal(signal.SIGTERM, broker.stop)
    pipe.send((None, "ready"))
    broker.run()


def _borrow(label: str, tag: int, seed: int, pipe: Connection) -> None:
    logging.getLogger("vattn").setLevel(logging.ERROR)  # a broker that is killed is a warning
    rng = random.Random(seed)
    made = Borrowing(NAME, label, tag, rng)
    pipe.send((None, 0))
    while True:
        what, *given = pipe.recv()
        before, found, answer = made.calls, made.found, None
        if what == "play":
            for _ in range(given[0]):
                made.turn()
                if rng.random() < 0.05:
                    made.check()
            answer = made.calls - before, made.found - found
        elif what == "check":
            made.check()
        elif what == "let go":
            made.let_go()
        elif what == "name":
            answer = made.name
        elif what == "take":
            answer = made.take(given[0])
        elif what == "leave":
            made.let_go()
            made.leave()
        pipe.send((None, answer))


def _lie(count: int, seed: int, pipe: Connection) -> None:
    """Says what is no message, or not true."""
    rng = random.Random(seed)
    peer = None
    for _ in range(count):
        if peer is None or rng.random() < 0.03:
            peer = _connected_socket()
        data = _join(rng) if rng.random() < 0.1 else malformed.message(rng)
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
        if not _send(peer, data, rng.choice((0, 0, 0, 0, 1, 1, 2, 6))):
            peer = None
    pipe.send((None, None))
    pipe.recv()


def _join_often(count: int, seed: int, pipe: Connection) -> None:
    """Joins and joins, and closes the connection each time."""
    rng = random.Random(seed)
    for _ in range(count):
        _send(_connected_socket(), _join(rng), 1)
    pipe.send((None, None))
    pipe.recv()


def _join(rng: random.Random) -> bytes:
    said = {"version": VERSION, "identity": str(rng.random()), "name": "liar" * 8, "device": "cpu", "page": PAGE}
    said |= {"at_least": 0, "at_most": None, "lease": rng.choice((0, PAGE, PAGES * PAGE, 2**50))}
    return encode("join", **said)


def _connected_socket() -> socket.socket | None:
    with contextlib.suppress(OSError):  # there is no broker now
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(0.2)
        peer.connect(str(socket_path(NAME)))
        return peer
    return None


def _send(peer: socket.socket | None, data: bytes, count: int) -> bool:
    """Sends something with so many descriptors, and waits a moment for the answer; whether the connection stands."""
    given = [_memory() for _ in range(count)]
    try:
        if peer is None:
            return False
        socket.send_fds(peer, [data], given)
        peer.settimeout(0.002)
        answer, descriptors, _, _ = socket.recv_fds(peer, 2**16, 8)
        if descriptors:
            raise Wrong("a broker sends a descriptor:")
        return bool(answer)
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        for descriptor in given:
            os.close(descriptor)


def _memory() -> int:
    """A file such as a borrower's memory is in, with something in it."""
    descriptor = os.memfd_create("vattn of a liar", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.pwrite(descriptor, bytes(PAGE), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor
