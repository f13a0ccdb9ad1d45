"""The broker's process: who may speak to it, what it makes of what it hears, and what its kernel-side books say."""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import json
import math
import os
import random
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks, malformed
from tests.support.effort import effort
from tests.support.waiting import SECONDS, wait_until
from vattn.broker import server
from vattn.broker.books import Books
from vattn.broker.directory import Directory, OwnDirectory, Shape
from vattn.broker.notes import Notes
from vattn.broker.places import FOLDER_VARIABLE, folder, left_path, socket_path
from vattn.broker.server import Broker
from vattn.broker.wire import MOST_BYTES, VERSION, Reader, WireError, decode, encode
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


def test_a_device_that_is_none(broker: Broker) -> None:
    for device in ("", "foo", "CPU", "cuda", "cuda:-1", "cuda:01", "cuda:1000", "cpu\n"):
        with pytest.raises(ConfigError, match="give cpu, or a GPU by its number"):
            Broker("q", BUDGET, device=device)
    Broker("q", BUDGET, device="cuda:7").close()


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
    usage = {"owned": 0, "parked": 0, "cached": 0, "oldest": None, "shared": 0}
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
    refused = [(memory(fcntl.F_SEAL_SHRINK),), (os.open(tmp_path, os.O_RDONLY),), os.pipe(), (os.dup(file),)]
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


def directory(seal: int = 0) -> int:
    """The file of one, with a seal more than it needs."""
    file = os.memfd_create("a directory", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with contextlib.closing(OwnDirectory.make(Shape(bytes(32), PAGE, 4, 1, 8))) as made:
        os.pwrite(file, os.pread(made.fileno(), made.shape.num_bytes, 0), 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, server._SEALS | fcntl.F_SEAL_GROW | seal)
    return file


def end(broker: Broker, peer: Peer) -> None:
    """Has the only borrower end, which has published nothing."""
    (borrower,) = broker._borrowers
    peer.close()
    broker._ended(borrower)
    broker.audit()
    assert broker._kept == []


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_APPEND])
def test_a_directory_can_be_written_to_however_it_came(broker: Broker, flags: int) -> None:
    peer, file = joined(broker)
    mine = directory()
    given = os.open(f"/proc/self/fd/{mine}", flags)
    assert peer.say(encode("share"), given) == []
    end(broker, peer)
    with contextlib.closing(Directory(mine)) as left:
        assert left.ended
    os.close(given)
    os.close(file)


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, 0x10])  # the latter is F_SEAL_FUTURE_WRITE
def test_a_directory_that_cannot_be_written_to_is_refused(broker: Broker, seal: int) -> None:
    peer, file = joined(broker)
    mine = directory(seal)
    assert [answer["kind"] for answer in peer.say(encode("share"), mine)] == ["refused"]
    end(broker, peer)
    os.close(mine)
    os.close(file)


def test_memory_that_is_not_one_file_is_what_its_borrower_says(broker: Broker) -> None:
    peer = Peer(broker)
    assert peer.say(join())[0]["kind"] == "joined"
    usage = {"owned": 2 * PAGE, "parked": 0, "cached": 0, "oldest": None, "shared": 0}
    peer.say(encode("report", ack=1, lease=0, want=8 * PAGE, urgent=0, wish=1, **usage))
    assert broker.books.available == BUDGET - 8 * PAGE
    assert broker.check() == []
    peer.say(encode("leave"))
    assert broker.books.accounts == []
    assert broker.books.available == BUDGET
    peer.close()


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


def test_who_joins_again_has_the_limits_that_were_set_meanwhile(broker: Broker) -> None:
    a, first = joined(broker, at_least=40 * PAGE)
    broker.books.limit(broker.books.accounts[0], 8 * PAGE, None)
    b, second = joined(broker, name="b", identity="y", at_least=40 * PAGE)  # what a had
    a.close()
    again = Peer(broker)
    (answer,) = again.say(join(at_least=40 * PAGE), first)
    assert (answer["kind"], answer.get("at_least")) == ("joined", 8 * PAGE)
    for peer in (again, b):
        peer.close()
    for file in (first, second):
        os.close(file)


@pytest.mark.parametrize(
    ("said", "counted"), [("0", None), (str(3 * PAGE), 3 * PAGE), ("", 8 * PAGE), ("-1", 8 * PAGE), ("9" * 9, 8 * PAGE)]
)
def test_who_left_while_there_was_no_broker_has_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, counted: int | None
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    note = {"identity": "0" * 32, "name": "a", "pid": os.getpid(), "started": server.started(os.getpid())}
    note |= {"at_least": 0, "at_most": None, "page": PAGE, "lease": 8 * PAGE}
    (tmp_path / "p.books").write_text(json.dumps([note, {**note, "identity": "../b", "name": "b"}]))
    left, of_nobody = (left_path(tmp_path / "p.sock", each * 32) for each in "01")
    for path in (left, of_nobody):
        path.write_text(said)
    broker = Broker("p", BUDGET)
    assert (left.exists(), of_nobody.exists()) == (True, False)
    broker.turn(0)
    leases = {account.name: account.lease for account in broker.books.accounts}
    assert leases == {"b": 8 * PAGE} | ({} if counted is None else {"a": counted})
    assert broker.check() == []
    broker.close()


def test_a_process_that_ends_while_it_joins_harms_nobody(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: int) -> int:
        raise FileNotFoundError("/proc/1/stat")

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("vattn.broker.server.started", gone)
    peer, file = Peer(broker), memory()
    (answer,) = peer.say(join(), file)
    assert answer["kind"] == "refused"
    peer.close()
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert broker.books.accounts == []


def test_a_borrower_that_ends_meanwhile_hides_no_other_from_the_next_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    noted = {"pid": os.getpid(), "at_least": 0, "at_most": BUDGET, "page": PAGE, "lease": 4 * PAGE}
    started = server.started(os.getpid())
    ended = subprocess.Popen(["true"])
    notes = [
        {**noted, "identity": "x", "name": "x", "pid": ended.pid, "started": 1},
        "no note",
        {"identity": "y"},
        {**noted, "identity": "v", "name": "v", "started": started, "pid": 2**49},
        {**noted, "identity": "w", "name": "w", "started": started, "at_least": "4GiB"},
        {**noted, "identity": "u", "name": "u", "started": started, "page": 0},
        {**noted, "identity": "z", "name": "z", "started": started},
    ]
    (tmp_path / "p.books").write_text(json.dumps(notes))

    def look(pid: int) -> int:
        if pid == ended.pid:  # it is reaped between two looks at it
            ended.wait()
            raise FileNotFoundError
        return started

    monkeypatch.setattr("vattn.broker.server.started", look)
    broker = Broker("p", BUDGET)
    assert [(account.name, account.lease) for account in broker.books.accounts] == [("z", 4 * PAGE)]
    broker.close()
    ended.wait()


def wish(pages: int) -> bytes:
    usage = {"owned": 0, "parked": 0, "cached": 0, "oldest": None, "shared": 0}
    return encode("report", ack=1, lease=0, want=pages * PAGE, urgent=2, wish=1, **usage)


def test_a_slow_disk_holds_up_what_has_to_be_noted_and_nothing_else(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, file = joined(broker)
    goes_on, replace = threading.Event(), Notes._replace

    def slowly(notes: Notes, text: bytes) -> None:
        assert goes_on.wait(SECONDS)
        replace(notes, text)

    monkeypatch.setattr(Notes, "_replace", slowly)
    monkeypatch.setattr(server, "_NOTING", 0.001)
    assert a.say(wish(4)) == []
    operator = Peer(broker)
    (answer,) = operator.say(encode("top"))
    assert answer["result"]["borrowers"][0]["lease"] == 4 * PAGE
    assert a.hear() == [], "nobody has what is not noted"
    goes_on.set()
    told: list[dict[str, Any]] = []
    wait_until(lambda: told.extend(a.hear()) or told)
    assert told[-1]["lease"] == 4 * PAGE
    assert json.loads((broker.path.parent / "p.books").read_text())[0]["lease"] == 4 * PAGE
    operator.close()
    a.close()
    os.close(file)


def test_a_full_disk_ends_no_broker(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    a, file = joined(broker)
    full, replace = threading.Event(), Notes._replace
    full.set()

    def write(notes: Notes, text: bytes) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        replace(notes, text)

    monkeypatch.setattr(Notes, "_replace", write)
    told: list[dict[str, Any]] = []
    said = [*a.say(wish(4))]
    wait_until(lambda: told.extend([*said, *a.hear()]) or told)
    assert told[-1]["lease"] == 4 * PAGE
    (problem,) = broker.check()
    assert problem.startswith("leases cannot be noted for the next broker: ")
    full.clear()
    broker._audited = 0.0
    wait_until(lambda: broker.turn(0) or not broker.check())
    assert json.loads((broker.path.parent / "p.books").read_text())[0]["lease"] == 4 * PAGE
    a.close()
    os.close(file)


def test_what_is_left_by_a_process_that_ends_before_it_shares_is_taken_over(broker: Broker) -> None:
    """Also if another one says so before the broker has looked at that process, and its parent never does."""
    good, own = joined(broker, name="good", identity="good")
    file = memory()
    os.ftruncate(file, 8 * PAGE)
    os.pwrite(file, b"published", 0)
    here, there = socket.socketpair()
    here.settimeout(SECONDS)

    def share() -> None:
        directory = OwnDirectory.make(Shape(b"f" * 32, PAGE, 16, 1, 8))
        directory.add(b"k" * 32, range(16), [0])
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(str(broker.path))
        socket.send_fds(peer, [join(name="other", identity="other")], [file])
        there.send(bytes([directory.fileno()]))
        signal.pause()

    with here, forks.running(share) as child:
        there.close()
        ended = os.pidfd_open(child)
        shown = os.open(f"/proc/{child}/fd/{here.recv(1)[0]}", os.O_RDWR)
        wait_until(lambda: broker.turn(0) or [each.name for each in broker.books.accounts] == ["good", "other"])
        good.socket.sendall(wish(0))  # so that this connection is looked at first
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: select.select([ended], [], [], 0)[0])
        good.say(encode("orphan"), file, shown)
        assert [each.name for each in broker.books.accounts] == ["good"]
        assert broker.books.kept == PAGE
    good.close()
    for descriptor in (own, file, shown, ended):
        os.close(descriptor)


def test_without_a_free_descriptor_others_are_served(broker: Broker) -> None:
    a, file = joined(broker)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = socket.socket(socket.AF_UNIX)
    late.settimeout(SECONDS)
    late.connect(str(broker.path))
    broker._notes.wait(SECONDS)
    gc.collect()  # garbage of other tests would give descriptors back in the middle
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held: list[int] = []

    def hold_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(file))

    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        hold_all()
        broker._audited = math.inf  # with an audit it tries again
        for _ in range(3):
            broker.turn(0)
        ready = [key.fileobj for key, _ in broker._selector.select(0)]
        assert broker._listener not in ready, "it looks at nothing again and again"
        hold_all()  # what threads of other tests have closed meanwhile
        assert any("own descriptors cannot be counted" in problem for problem in broker.check())
        assert not broker._send_files(next(iter(broker._peers)), "peer", file, file)
        (lease,) = a.say(wish(4))
        assert lease["lease"] == 4 * PAGE or broker._notes.trouble
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
    broker._audited = 0.0
    broker._notes.wait(SECONDS)
    broker._notes.try_again()
    late.sendall(encode("top"))
    for _ in range(4):
        broker.turn(0)
    assert late.recv(2**16)
    late.close()
    wait_until(lambda: broker.turn(0) or not broker.check())
    a.close()
    os.close(file)


def test_the_answer_of_a_full_broker_is_a_message(broker: Broker) -> None:
    books = Books(2**49)
    for number in range(server._MOST_BORROWERS):
        account = books.join(f"{number:032}", page=PAGE)
        for name in ("lease", "want", "owned", "parked", "cached", "found", "asked_back"):
            setattr(account, name, 2**49)
    broker.books.accounts, before = books.accounts, broker.books.accounts
    try:
        encode("answer", result=broker._control({"kind": "top"}))
    finally:
        broker.books.accounts = before


def test_the_answer_to_a_check_that_finds_much_is_a_message(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(broker)
    with monkeypatch.context() as patch:
        patch.setattr(broker, "check", lambda: [f"problem {number} {'x' * 300}" for number in range(5000)])
        (answer,) = peer.say(encode("check"))
        problems = answer["result"]["problems"]
        assert len(problems) == 201
        assert problems[199].startswith("problem 199 x")
        assert problems[200] == "4800 more"
        assert peer.say(encode("top"))[0]["kind"] == "answer"
        patch.setattr(server, "_MOST_PROBLEMS", 5000)
        refused, closed = [*peer.say(encode("check")), *peer.hear()]
    assert refused["kind"] == "refused"
    assert "the broker's answer cannot be sent: a message of " in refused["why"]
    assert not closed
    peer.close()


def test_a_pool_has_no_more_borrowers_than_top_can_show(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that ends does not end what its process has borrowed."""
    monkeypatch.setattr(server, "_MOST_BORROWERS", 3)
    for number in range(5):
        peer, own = Peer(broker), memory()
        (answer,) = peer.say(join(name=f"{number}", identity=f"{number}"), own)
        assert answer["kind"] == ("joined" if number < 3 else "refused"), answer
        peer.close()
        os.close(own)
    again, own = Peer(broker), memory()
    assert again.say(join(name="0", identity="0"), own)[0]["kind"] == "joined"
    again.close()
    os.close(own)


def test_with_all_borrowers_there_is_a_connection_for_control(broker: Broker) -> None:
    peers = [joined(broker, name="a", identity=f"{number}") for number in range(server._MOST_BORROWERS)]
    control = Peer(broker)
    (answer,) = control.say(encode("top"))
    assert len(answer["result"]["borrowers"]) == server._MOST_BORROWERS
    one_more, own = Peer(broker), memory()
    (answer,) = one_more.say(join(identity="one more"), own)
    assert answer["why"] == f"the pool has {server._MOST_BORROWERS} borrowers, which is the most"
    one_more.close()
    control.close()
    for peer, file in [*peers, (one_more, own)]:
        peer.close()
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


def test_malformed_messages_harm_nobody(broker: Broker) -> None:
    """Whatever comes, the broker goes on, sends no descriptor, keeps none, and a borrower beside it keeps its own."""
    rng = random.Random(29)
    good, file = joined(broker, name="good", identity="good", at_least=4 * PAGE)
    usage = {"owned": 0, "parked": 0, "cached": 0, "oldest": None, "shared": 0}
    (lease,) = good.say(encode("report", ack=1, lease=0, want=4 * PAGE, urgent=2, wish=1, **usage))
    os.pwrite(file, b"mine", 0)
    descriptors = len(os.listdir("/proc/self/fd"))
    peer = Peer(broker)
    for _ in range(effort(3_000, 100_000)):
        given = [memory()] if rng.random() < 0.05 else []
        if rng.random() < 0.03:
            given += [os.open("/dev/null", os.O_RDONLY) for _ in range(rng.choice([1, 2, 6]))]
        data = join(name="bad", identity=str(rng.random())) if rng.random() < 0.02 else malformed.message(rng)
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
        answers = peer.say(data, *given)
        for descriptor in given:
            os.close(descriptor)
        if {} in answers or rng.random() < 0.02:
            peer.close()
            peer = Peer(broker)
        for borrower in [b for b in broker._borrowers if b.peer is None]:
            broker._ended(borrower)  # as if the process had ended
        assert all(said["kind"] == "lease" and said["lease"] >= 4 * PAGE for said in good.hear())
        broker.books.check()
    peer.close()
    for borrower in [b for b in broker._borrowers if b.account.name != "good"]:
        broker._ended(borrower)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    (account,) = broker.books.accounts
    assert (account.name, account.lease, lease["lease"]) == ("good", 4 * PAGE, 4 * PAGE)
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
    import sys

    script = (
        "import sys, vattn.broker.server, vattn.broker.control, vattn.engine.cli.pool; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
