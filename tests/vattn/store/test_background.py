"""Threads between an engine and a store: nothing waits for the disk, and nothing of it is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.waiting import SECONDS, wait_until
from vattn.store import background
from vattn.store.background import ReadAhead, Trouble, Write, WriteBehind
from vattn.store.blockfile import Block, Buffer
from vattn.store.folder import PrefixStore

BYTES = 100


def block(number: int) -> Block:
    return Block(bytes(32), number.to_bytes(32), number, [number])


def write(number: int) -> Write:
    return Write(block(number), lambda: [bytes([number]) * BYTES], BYTES)


class Gated(PrefixStore):
    """A store whose disk can be held, and can fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 2**20)
        self.gate = threading.Event()
        self.gate.set()
        self.failure: OSError | None = None

    def put(self, block: Block, parts: Sequence[Buffer], *, used_ns: int | None = None) -> bool:
        self.pass_gate()
        return super().put(block, parts, used_ns=used_ns)

    def read(self, block: Block, allocate: object = None) -> list[memoryview] | None:
        self.pass_gate()
        return super().read(block)

    def pass_gate(self) -> None:
        self.gate.wait()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def store(tmp_path: Path) -> Gated:
    return Gated(tmp_path / "store")


@pytest.fixture
def trouble(store: Gated) -> Trouble:
    return Trouble(store)


@pytest.fixture
def writer(store: Gated, trouble: Trouble) -> Iterator[WriteBehind]:
    writer = WriteBehind(store, trouble, most_bytes=3 * BYTES)
    yield writer
    store.gate.set()
    writer.close()


@pytest.fixture
def reader(store: Gated, trouble: Trouble) -> Iterator[ReadAhead]:
    reader = ReadAhead(store, trouble, most_bytes=3 * BYTES, allocate=lambda size: memoryview(bytearray(size)))
    yield reader
    store.gate.set()
    reader.close()


def put(writer: WriteBehind, *numbers: int) -> None:
    assert writer.has_room(len(numbers) * BYTES)
    writer.put([block(number).key for number in range(max(numbers) + 1)], [write(number) for number in numbers])


def test_what_is_put_is_written(store: Gated, writer: WriteBehind) -> None:
    put(writer, 0, 1)
    writer.flush()
    assert [entry.head().depth for entry in store.entries()] == [1, 0], "the end of the prefix gives way first"  # type: ignore[union-attr]
    assert writer.knows(block(0).key)
    assert not writer.knows(block(2).key)


def test_a_writer_that_falls_behind_drops_what_has_no_room(store: Gated, writer: WriteBehind) -> None:
    store.gate.clear()
    put(writer, 0, 1, 2)
    assert not writer.has_room(BYTES)
    assert writer.dropped == 1
    store.gate.set()
    writer.flush()
    assert writer.has_room(BYTES)
    assert len(store.entries()) == 3


def test_a_writer_that_is_held_up_notes_the_last_uses(
    store: Gated, writer: WriteBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[bytes]()
    monkeypatch.setattr(store, "use", lambda prefix, **_: used.extend(prefix) or len(prefix))
    store.gate.clear()
    put(writer, 0)
    keys = [block(number).key for number in range(1, 1000)]
    for key in keys:
        writer.put([key], [])
    put(writer, 1)
    writer.remove([block(5).key])
    writer.put(keys[:1], [])
    assert len(writer._jobs) == background._MOST_USES + 3
    store.gate.set()
    writer.flush()
    first = len(keys) - background._MOST_USES + 1
    assert used == [block(0).key, *keys[first:], block(0).key, block(1).key, keys[0]]
    assert len(store.entries()) == 2


def test_closing_writes_what_waits(store: Gated, writer: WriteBehind) -> None:
    store.gate.clear()
    put(writer, 0, 1)
    store.gate.set()
    writer.close()
    assert len(store.entries()) == 2
    assert not writer.has_room(BYTES)
    writer.put([block(5).key], [write(5)])
    writer.flush()
    assert len(store.entries()) == 2


def test_a_disk_that_fails_is_left_alone_for_a_while(
    store: Gated,
    writer: WriteBehind,
    trouble: Trouble,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.failure = OSError(28, "No space left on device")
    store.gate.clear()
    put(writer, 0)
    writer.put([block(0).key, block(1).key], [write(1)])
    store.gate.set()
    writer.flush()
    assert not writer.has_room(BYTES)
    assert (trouble.errors, trouble.lasts, store.entries()) == (1, True, [])
    assert writer.dropped == 3
    assert not writer.knows(block(0).key), "it is tried again with the next request"
    assert [record.message for record in caplog.records] == [
        f"the store {store.path}: a block could not be written: [Errno 28] No space left on device; "
        "going on without for 60 s"
    ]
    store.failure = None
    trouble._until = 0.0  # a minute later
    put(writer, 0)
    writer.flush()
    assert len(store.entries()) == 1


def test_blocks_that_others_deleted_are_written_again(store: Gated, writer: WriteBehind) -> None:
    put(writer, 0, 1)
    writer.flush()
    store.trim(0)
    writer.put([block(0).key, block(1).key], [])  # the prefix was used
    writer.flush()
    assert not writer.knows(block(0).key)
    assert not writer.knows(block(1).key)


def test_what_is_missed_is_known_only_while_it_waits_to_be_written(store: Gated, writer: WriteBehind) -> None:
    put(writer, 0)
    writer.flush()
    store.gate.clear()
    put(writer, 1)
    writer.miss([block(number).key for number in range(3)])
    assert [writer.knows(block(number).key) for number in range(3)] == [False, True, False]


def test_what_is_removed_was_not_written_before_it(store: Gated, writer: WriteBehind) -> None:
    store.gate.clear()
    put(writer, 0, 1)
    writer.remove([block(1).key])
    store.gate.set()
    writer.flush()
    assert [entry.key for entry in store.entries()] == [block(0).key.hex()]
    assert not writer.knows(block(1).key)


def test_what_cannot_be_deleted_hinders_no_other_and_is_tried_again(
    store: Gated, writer: WriteBehind, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(writer, 0, 1)
    writer.flush()
    removed: list[bytes] = []

    def remove(key: bytes) -> None:
        if key == block(0).key:
            raise OSError(30, "Read-only file system")
        removed.append(key)
        PrefixStore.remove(store, key)

    with monkeypatch.context() as failing:
        failing.setattr(store, "remove", remove)
        writer.remove([block(0).key, block(1).key])
        writer.flush()
        assert removed == [block(1).key]
        assert (trouble.errors, trouble.lasts) == (1, True)
        trouble._until = 0.0  # a minute later
        put(writer, 2)
        put(writer, 0)
        writer.flush()
        assert (trouble.errors, trouble.lasts) == (1, False)
        assert {entry.key for entry in store.entries()} == {block(0).key.hex(), block(2).key.hex()}
        assert not writer.knows(block(0).key), "it is not written while another has its name"
    assert [writer.removes(block(number).key) for number in (0, 1)] == [True, False]
    PrefixStore.remove(store, block(2).key)
    store.gate.clear()
    put(writer, 0)
    wait_until(lambda: not writer.removes(block(0).key))
    assert store.entries() == [], "it is deleted before another is written in its place"
    store.gate.set()
    writer.flush()
    assert len(store.entries()) == 1


def test_what_could_not_be_deleted_is_tried_again_at_the_end(
    store: Gated, writer: WriteBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(writer, 0)
    writer.flush()

    def remove(key: bytes) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as failing:
        failing.setattr(store, "remove", remove)
        writer.remove([block(0).key])
        writer.flush()
    assert len(store.entries()) == 1
    writer.close()
    assert store.entries() == []


def test_a_block_that_is_to_be_removed_twice_waits_for_the_second_time(store: Gated, writer: WriteBehind) -> None:
    store.gate.clear()
    writer.remove([block(0).key])
    put(writer, 0)
    writer.remove([block(0).key])
    put(writer, 1)
    wait_until(lambda: len(writer._jobs) == 3)
    assert writer.removes(block(0).key)
    store.gate.set()
    wait_until(lambda: not writer.removes(block(0).key))
    writer.flush()
    assert [entry.key for entry in store.entries()] == [block(1).key.hex()]


def fill(store: PrefixStore, *numbers: int) -> list[Block]:
    for number in numbers:
        store.put(block(number), [bytes([number]) * BYTES])
    return [block(number) for number in numbers]


def test_a_prefix_is_read_up_to_the_first_block_that_is_not_there(store: Gated, reader: ReadAhead) -> None:
    fill(store, 0, 1, 3)
    fetch = reader.fetch([block(number) for number in range(4)])
    assert fetch is not None
    reader.wait(fetch)
    assert [bytes(each.parts[0]) for each in reader.take(fetch)] == [bytes([0]) * BYTES, bytes([1]) * BYTES]
    assert reader.fetch([block(2), block(3)]) is None


def test_what_is_looked_for_and_not_there_is_told(store: Gated, trouble: Trouble) -> None:
    missed: list[list[int]] = []

    def miss(keys: Sequence[bytes]) -> None:
        missed.append([int.from_bytes(key) for key in keys])

    reader = ReadAhead(store, trouble, most_bytes=BYTES, allocate=lambda size: memoryview(bytearray(size)), missed=miss)
    with closing(reader):
        blocks = [*fill(store, 0, 1, 2), block(3)]
        path = store.path / f"{block(1).key.hex()}.kv"
        path.write_bytes(path.read_bytes()[:-1])
        fetch = reader.fetch(blocks)
        assert fetch is not None
        reader.wait(fetch)
    assert missed == [[3], [1, 2]]


def test_a_changed_block_ends_the_prefix(store: Gated, reader: ReadAhead, caplog: pytest.LogCaptureFixture) -> None:
    blocks = fill(store, 0, 1, 2)
    path = store.path / f"{block(1).key.hex()}.kv"
    path.write_bytes(path.read_bytes()[:-1])
    fetch = reader.fetch(blocks)
    assert fetch is not None
    reader.wait(fetch)
    assert len(reader.take(fetch)) == 1
    assert "cut off or changed" in caplog.text


def test_blocks_that_several_wait_for_are_read_once(store: Gated, reader: ReadAhead) -> None:
    blocks = fill(store, 0, 1)
    store.gate.clear()
    fetches = [reader.fetch(blocks) for _ in range(3)]
    store.gate.set()
    taken = []
    for fetch in fetches:
        assert fetch is not None
        reader.wait(fetch)
        taken.append(list(fetch.found))
    assert {id(each) for found in taken for each in found} == {id(each) for each in taken[0]}
    assert len(taken[0]) == 2


def test_no_further_prefix_is_begun_while_too_much_is_held(store: Gated, reader: ReadAhead) -> None:
    first, second = fill(store, 0, 1, 2, 3), fill(store, 4)
    held, waiting = reader.fetch(first), reader.fetch(second)
    assert held is not None
    assert waiting is not None
    reader.wait(held)
    assert len(held.found) == 4
    assert waiting.found == []
    reader.drop(held)
    assert waiting.ended.wait(SECONDS)
    assert len(waiting.found) == 1


def test_a_slow_disk_is_waited_for_no_longer_than_the_patience(
    store: Gated, reader: ReadAhead, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PATIENCE", 0.05)
    blocks = fill(store, 0, 1)
    store.gate.clear()
    fetch = reader.fetch(blocks)
    assert fetch is not None
    reader.wait(fetch)  # returns, although the disk does not
    assert reader.take(fetch) == []
    assert (trouble.errors, trouble.lasts) == (1, True)
    assert reader.fetch(blocks) is None
    store.gate.set()
    wait_until(fetch.ended.is_set)


def test_nothing_is_waited_for_while_the_disk_is_left_alone(
    store: Gated, reader: ReadAhead, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PATIENCE", 600.0)
    store.gate.clear()
    fetch = reader.fetch(fill(Gated(store.path), 0))
    assert fetch is not None
    assert not reader.is_ready(fetch)
    trouble.note("it hangs")
    assert reader.is_ready(fetch)
    assert reader.take(fetch) == []
    assert trouble.errors == 1


def test_a_folder_that_cannot_be_searched_is_empty(
    store: Gated, reader: ReadAhead, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = fill(store, 0)

    def exists(path: Path) -> bool:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(Path, "exists", exists)
        assert reader.fetch(blocks) is None
    assert trouble.errors == 1


def test_a_disk_that_fails_while_it_is_read_is_a_miss(store: Gated, reader: ReadAhead, trouble: Trouble) -> None:
    blocks = fill(store, 0)
    store.failure = OSError(24, "Too many open files")
    fetch = reader.fetch(blocks)
    assert fetch is not None
    reader.wait(fetch)
    assert reader.take(fetch) == []
    assert trouble.errors == 1
    assert len(store.entries()) == 1
