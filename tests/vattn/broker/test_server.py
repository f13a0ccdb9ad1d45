"""The broker's process: who may speak to it, what it makes of what it hears, and what its kernel-side books say."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import random
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.effort import effort
from vattn.broker.places import FOLDER_VARIABLE, folder, socket_path
from vattn.broker.server import Broker
from vattn.broker.wire import KINDS, MOST_BYTES, VERSION, Reader, WireError, decode, encode
from vattn.errors import ConfigError

PAGE = 4096
BUDGET = 64 * PAGE


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    broker = Broker("p", BUDGET)
    yield broker
    assert broker.check() == []
    broker.close()


def memory(seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL) -> int:
    descriptor = os.memfd_create("a borrower", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def join(**fields: Any) -> bytes:
    said = {"version": VERSION, "identity": "x", "name": "a", "device": "cpu", "page": PAGE}
    return encode("join", **(said | {"at_least": 0, "at_most": None, "lease": 0} | fields))


class Peer:
    """The other side of a connection, in this process, which also turns the broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(broker.path))
        self.reader = Reader()
        broker.turn(0)

    def say(self, data: bytes, *descriptors: int) -> list[dict[str, Any]]:
        """What comes back, but for a closed connection, which comes back as a message without a kind."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if descriptors:
                socket.send_fds(self.socket, [data], descriptors)
            else:
                self.socket.sendall(data)
        return self.hear()

    def hear(self) -> list[dict[str, Any]]:
        for _ in range(4):
            self.broker.turn(0)
        self.socket.setblocking(False)
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 2**20, 8)
            assert not descriptors, "a broker sends no descriptor"
            return [*self.reader.feed(data)] if data else [{}]
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return [{}]
        finally:
            self.socket.setblocking(True)

    def close(self) -> None:
        self.socket.close()
        self.broker.turn(0)


def joined(broker: Broker, **fields: Any) -> tuple[Peer, int]:
    peer, file = Peer(broker), memory()
    answers = peer.say(join(**fields), file)
    assert answers[0]["kind"] == "joined", answers
    return peer, file


def test_only_its_user_can_get_at_the_socket(broker: Broker) -> None:
    assert stat.S_IMODE(broker.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(broker.path.parent.stat().st_mode) == 0o700
    broker.path.parent.chmod(0o750)
    with pytest.raises(ConfigError, match="nobody else can enter"):
        folder()
    broker.path.parent.chmod(0o700)


def test_a_peer_of_another_user_is_turned_away(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    peer = Peer(broker)
    assert peer.hear() == [{}]
    peer.close()


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a" * 33, ".x", "é"])
def test_names_name_no_other_files(name: str, broker: Broker) -> None:
    with pytest.raises(ConfigError, match="give up to 32 letters"):
        socket_path(name)


def test_a_pool_has_one_broker(broker: Broker) -> None:
    with pytest.raises(ConfigError, match="has a broker already"):
        Broker("p", BUDGET)


def test_a_lease_grows_is_asked_back_and_ends_with_the_memory(broker: Broker) -> None:
    a, file = joined(broker)
    report = {"ack": 1, "lease": 0, "want": 8 * PAGE, "urgent": 0, "wish": 1}
    usage = {"owned": 0, "parked": 0, "cached": 0, "oldest": None}
    (lease,) = a.say(encode("report", **report, **usage))
    assert (lease["lease"], lease["number"]) == (8 * PAGE, 2)
    os.pwrite(file, bytes(10 * PAGE), 0)  # more than it was lent
    broker.audit()
    assert broker.books.available == BUDGET - 10 * PAGE
    assert broker.check() == [f"a has {10 * PAGE} bytes and a lease of {8 * PAGE}"]
    fcntl.fcntl(file, fcntl.F_GET_SEALS)
    os.close(file)
    a.say(encode("leave"))
    a.close()
    # It has left memory behind, which counts until the process has ended or given it back.
    assert broker.books.available == BUDGET - 10 * PAGE
    (left,) = broker._borrowers
    assert left.memory is not None
    os.close(left.process)
    broker._selector.unregister(left.process)
    left.process = os.eventfd(1)
    broker._selector.register(left.process, 1, lambda _: broker._ended(left))
    broker.turn(0)
    assert broker.books.available == BUDGET


def test_what_is_no_memory_is_refused(broker: Broker, tmp_path: Path) -> None:
    first, file = joined(broker, name="first")
    refused = [(memory(fcntl.F_SEAL_SHRINK),), (os.open(tmp_path, os.O_RDONLY),), os.pipe(), (os.dup(file),), ()]
    for given in refused:
        peer = Peer(broker)
        answers = peer.say(join(name="second", identity="y"), *given)
        assert answers[0].get("kind") in ("refused", None), answers
        peer.close()
        for descriptor in given:
            os.close(descriptor)
    assert [account.name for account in broker.books.accounts] == ["first"]
    first.close()
    os.close(file)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": VERSION + 1}, "update one"),
        ({"device": "cuda:0"}, "is on cpu"),
        ({"name": "a b"}, "give up to 32 letters"),
        ({"at_least": 2 * BUDGET}, "is more than at most"),
        ({"at_most": 1}, "below one page"),
        ({"page": 3 * PAGE}, "are not possible"),
        ({"lease": 1}, "number of pages"),
    ],
)
def test_a_join_that_is_not_possible_is_refused_with_the_reason(
    broker: Broker, fields: dict[str, Any], why: str
) -> None:
    peer, file = Peer(broker), memory()
    answers = peer.say(join(**fields), file)
    assert why in answers[0]["why"]
    peer.close()
    os.close(file)


def test_who_joins_again_is_known(broker: Broker) -> None:
    a, file = joined(broker)
    broker.books.limit(broker.books.accounts[0], None, 16 * PAGE)
    again = Peer(broker)
    (answer,) = again.say(join(lease=4 * PAGE), file)
    assert (answer["name"], answer["lease"], answer["at_most"]) == ("a", 4 * PAGE, 16 * PAGE)
    assert len(broker.books.accounts) == 1
    a.close()
    again.close()
    os.close(file)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"nul",
        b"[" * 30_000,
        b'{"kind":"top","x":1}',
        b'{"kind":"nothing"}',
        b'{"kind":["top"]}',
        b'{"kind":"limit","name":"a","at_least":1e3,"at_most":null}',
        b'{"kind":"limit","name":1}',
        b"\xff",
        b"9" * 9000,
        json.dumps({"kind": "limit", "name": "a", "at_least": 2**51, "at_most": None}).encode(),
    ],
)
def test_what_is_no_message_is_none(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(body)


def test_messages_are_found_wherever_they_are_divided() -> None:
    data = encode("top") + encode("refused", why="ü" * 100) + encode("leave")
    reader = Reader()
    found = [message["kind"] for i in range(len(data)) for message in reader.feed(data[i : i + 1])]
    assert found == ["top", "refused", "leave"]
    for length in (0, MOST_BYTES + 1, 2**32 - 1):
        with pytest.raises(WireError, match="a length"):
            list(Reader().feed(struct.pack(">I", length)))


def _nonsense(rng: random.Random) -> bytes:
    """A message that is nearly one, or nothing like one."""
    kind = rng.choice([*KINDS])
    values: list[Any] = [
        0,
        1,
        PAGE,
        BUDGET,
        -1,
        2**50,
        2**63,
        2**70,
        1.5,
        None,
        True,
        "",
        "a",
        "x" * 5000,
        [],
        {},
        "free",
    ]
    message = {"kind": kind} | {name: rng.choice(values) for name in KINDS[kind]}
    if rng.random() < 0.2 and len(message) > 1:
        message.pop(rng.choice([name for name in message if name != "kind"]))
    if rng.random() < 0.1:
        message[rng.choice(["kind", "extra", "ack"])] = rng.choice(values)
    body = bytearray(json.dumps(message).encode())
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        body[rng.randrange(len(body))] = rng.randrange(256)
    if rng.random() < 0.1:
        body = bytearray(rng.randbytes(rng.randrange(1, 64)))
    length = len(body) if rng.random() < 0.9 else rng.choice([0, 1, len(body) - 1, len(body) + 9, 2**31, 2**32 - 1])
    return struct.pack(">I", length) + bytes(body)


def test_malformed_messages_harm_nobody(broker: Broker) -> None:
    """Whatever comes, the broker goes on, sends no descriptor, keeps none, and a borrower beside it keeps its own."""
    rng = random.Random(29)
    good, file = joined(broker, name="good", identity="good", at_least=4 * PAGE)
    usage = {"owned": 0, "parked": 0, "cached": 0, "oldest": None}
    (lease,) = good.say(encode("report", ack=1, lease=0, want=4 * PAGE, urgent=2, wish=1, **usage))
    os.pwrite(file, b"mine", 0)
    descriptors = len(os.listdir("/proc/self/fd"))
    peer, borrows = Peer(broker), None
    for _ in range(effort(3_000, 100_000)):
        given = [memory()] if rng.random() < 0.05 else []
        if rng.random() < 0.03:
            given += [os.open("/dev/null", os.O_RDONLY) for _ in range(rng.choice([1, 2, 6]))]
        data = join(name="bad", identity=str(rng.random())) if rng.random() < 0.02 else _nonsense(rng)
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
        answers = peer.say(data, *given)
        for descriptor in given:
            os.close(descriptor)
        if {} in answers or rng.random() < 0.02:
            peer.close()
            peer, borrows = Peer(broker), None
        for borrower in [b for b in broker._borrowers if b.peer is None]:
            broker._ended(borrower)  # as if the process had ended
        assert not good.hear() or borrows is None
    peer.close()
    for borrower in [b for b in broker._borrowers if b.account.name != "good"]:
        broker._ended(borrower)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    (account,) = broker.books.accounts
    assert (account.name, account.lease >= 4 * PAGE, lease["lease"]) == ("good", True, 4 * PAGE)
    assert os.pread(file, 4, 0) == b"mine"
    good.close()
    os.close(file)


def test_descriptors_that_nobody_claims_are_closed(broker: Broker) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for count in (1, 2, 8):
        peer, given = Peer(broker), [memory() for _ in range(count)]
        size = array.array("i").itemsize
        assert size == 4
        peer.say(encode("top")[:3], *given)
        for descriptor in given:
            os.close(descriptor)
        peer.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_who_says_nothing_is_not_waited_for(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(broker)
    monkeypatch.setattr("vattn.broker.server._GREETING", 0.0)
    assert peer.hear() == [{}]
    peer.close()


def test_a_pool_needs_no_torch() -> None:
    import subprocess
    import sys

    script = (
        "import sys, vattn.broker.server, vattn.broker.control, vattn.engine.cli.pool; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
