"""A folder of blocks: what is read is what was put, or nothing; the quota holds; whoever is killed, nothing is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.effort import effort
from vattn.errors import ConfigError
from vattn.store import folder
from vattn.store.blockfile import KEY_BYTES, Block, pack
from vattn.store.folder import PrefixStore

PRINT = bytes(range(KEY_BYTES))
PARTS = (b"keys of a layer", b"", b"values")


def block(number: int = 0, **changed: object) -> Block:
    named = {
        "fingerprint": PRINT,
        "key": number.to_bytes(KEY_BYTES),
        "depth": 0,
        "token_ids": [number, -1],
        "label": "m",
    }
    return Block(**(named | changed))  # type: ignore[arg-type]


def the_file(store: PrefixStore) -> Path:
    (entry,) = store.entries()
    return entry.path


def contents(store: PrefixStore, wanted: Block) -> tuple[bytes, ...] | None:
    found = store.read(wanted)
    return None if found is None else tuple(map(bytes, found))


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    return PrefixStore(tmp_path / "store", 2**20)


def test_what_was_put_is_read_here_and_by_a_later_store(store: PrefixStore) -> None:
    assert contents(store, block()) is None
    assert store.put(block(), PARTS)
    assert contents(store, block()) == PARTS
    later = PrefixStore(store.path, 2**20)
    assert contents(later, block()) == PARTS
    assert (
        later.bytes == store.bytes == the_file(store).stat().st_size == len(pack(block(), PARTS)) + sum(map(len, PARTS))
    )
    assert later.rejected == 0


def test_every_flipped_byte_is_a_miss_and_the_file_is_deleted(store: PrefixStore) -> None:
    store.put(block(), PARTS)
    path = the_file(store)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 0x80):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            path.chmod(0o600)
            found = contents(store, block())
            # The label is for people. Its change is seen nevertheless.
            assert found is None, place
            assert not path.exists()
    path.write_bytes(whole)
    path.chmod(0o600)
    assert contents(store, block()) == PARTS


def test_every_length_but_its_own_is_a_miss_and_the_file_is_deleted(store: PrefixStore) -> None:
    store.put(block(), PARTS)
    path = the_file(store)
    whole = path.read_bytes()
    for length in [*range(len(whole)), len(whole) + 1]:
        path.write_bytes((whole + b"\0")[:length])
        path.chmod(0o600)
        assert contents(store, block()) is None, length
        assert not path.exists()
    assert store.rejected == len(whole) + 1


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": bytes(KEY_BYTES)},
        {"token_ids": [0, 1]},
        {"token_ids": [0]},
        {"token_ids": [0, -1, 2]},
        {"depth": 1},
    ],
)
def test_a_key_that_collides_is_a_miss(store: PrefixStore, changed: dict[str, object]) -> None:
    store.put(block(), PARTS)
    assert contents(store, block(**changed)) is None
    assert store.rejected == 1
    assert contents(store, block()) is None, "deleted, so that the other block can be written"


def test_a_file_of_one_block_under_the_name_of_another_is_a_miss(store: PrefixStore) -> None:
    store.put(block(1), PARTS)
    path = the_file(store)
    path.rename(path.with_name(f"{block(2).key.hex()}.kv"))
    assert contents(store, block(2)) is None
    assert store.entries() == []


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o777])
def test_a_file_that_others_may_have_written_is_a_miss(store: PrefixStore, mode: int) -> None:
    store.put(block(), PARTS)
    the_file(store).chmod(mode)
    assert contents(store, block()) is None
    assert store.entries() == []


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_what_is_no_file_is_a_miss(store: PrefixStore, tmp_path: Path, what: str) -> None:
    store.put(block(), PARTS)
    path = the_file(store)
    if what == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path, 0o600) if what == "pipe" else path.mkdir(0o700)
    assert contents(store, block()) is None
    assert store.rejected == 1


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"{path} must be a folder of your own .* chmod 700"):
        PrefixStore(path, 2**20)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="of your own"):
        PrefixStore(tmp_path / "store", 2**20)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    with pytest.raises(ConfigError, match="cannot be used"):
        PrefixStore(tmp_path / "file", 2**20)
    with pytest.raises(ConfigError, match="cannot be used"):
        PrefixStore(f"{tmp_path}/a\0b", 2**20)


def test_only_the_owner_may_read_what_is_there(store: PrefixStore) -> None:
    before = os.umask(0)
    try:
        fresh = PrefixStore(store.path.with_name("fresh"), 2**20)
        fresh.put(block(), PARTS)
    finally:
        os.umask(before)
    assert fresh.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in fresh.path.iterdir()} == {0o600}
    assert {path.name for path in fresh.path.iterdir()} == {"lock", f"{block().key.hex()}.kv"}


# The quota

SIZE = 1000


def big(number: int, depth: int = 0) -> tuple[Block, list[bytes]]:
    this = block(number, depth=depth)
    return this, [bytes(SIZE - len(pack(this, [b""])))]


def numbers(store: PrefixStore) -> set[int]:
    return {int(entry.key, 16) for entry in store.entries()}


def test_what_was_used_longest_ago_gives_way(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 3 * SIZE)
    for number in (1, 2, 3):
        assert store.put(*big(number), used_ns=number)
    assert store.use([block(1).key], used_ns=10) == 1
    assert store.put(*big(2), used_ns=11), "is there, so it counts as used"
    assert store.put(*big(4), used_ns=12)
    assert numbers(store) == {1, 2, 4}
    assert (store.bytes, store.evicted) == (3 * SIZE, 1)


def test_what_a_wrong_clock_dated_gives_way(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 3 * SIZE)
    for number in (1, 2, 3):
        assert store.put(*big(number), used_ns=time.time_ns() + 10**18)
    assert store.put(*big(4))
    assert 4 in numbers(store)
    assert store.bytes <= 3 * SIZE


def test_what_is_used_while_blocks_are_counted_is_not_the_oldest(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 3 * SIZE)
    for number, late in ((1, -2), (2, -1), (3, 1)):
        assert store.put(*big(number), used_ns=time.time_ns() + late * 10**9)
    assert store.put(*big(4), used_ns=time.time_ns() + 2 * 10**9)
    assert numbers(store) == {2, 3, 4}


def test_a_label_may_be_any_text(store: PrefixStore) -> None:
    assert store.put(block(label="caf\udce9"), PARTS)
    assert contents(store, block()) == PARTS


def test_of_one_prefix_the_end_gives_way(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 3 * SIZE)
    keys = [block(number).key for number in range(3)]
    for depth in range(3):
        store.put(*big(depth, depth), used_ns=100)
    assert store.use(keys, used_ns=200) == 3
    store.put(*big(7), used_ns=300)
    assert numbers(store) == {0, 1, 7}
    assert store.find(keys) == 2
    assert store.use(keys, used_ns=400) == 2


def test_a_prefix_longer_than_the_quota_keeps_its_start(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 3 * SIZE)
    assert [store.put(*big(depth, depth), used_ns=100) for depth in range(5)] == [True] * 3 + [False] * 2
    assert numbers(store) == {0, 1, 2}
    assert not store.put(block(9), [bytes(4 * SIZE)]), "larger than the quota"
    assert numbers(store) == {0, 1, 2}


def test_a_smaller_quota_applies_at_once(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 9 * SIZE)
    for number in range(9):
        store.put(*big(number), used_ns=number)
    assert PrefixStore(tmp_path, 2 * SIZE).bytes == 2 * SIZE
    assert numbers(store) == {7, 8}
    assert store.trim(SIZE) == SIZE
    assert store.trim(0) == SIZE
    assert (store.bytes, numbers(store)) == (0, set())


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("notes.kv", "abc.tmp", f"{'0' * 64}.kv.bak"):
        (tmp_path / name).write_text("mine")
    store = PrefixStore(tmp_path, SIZE)
    store.put(*big(1))
    assert store.bytes == SIZE
    store.trim(0)
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "notes.kv", "abc.tmp", f"{'0' * 64}.kv.bak"}


@pytest.mark.parametrize("name", [f"{block(1).key.hex()}.kv", f"{block(1).key.hex()}.{'0' * 16}.tmp"])
def test_a_folder_with_the_name_of_a_file_disturbs_nobody(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    tmp_path.chmod(0o700)
    store = PrefixStore(tmp_path, SIZE)
    assert store.bytes == 0
    assert store.put(*big(2), used_ns=1)
    assert store.put(*big(3), used_ns=2), "evicts what is not there"
    assert store.put(*big(1), used_ns=3) == name.endswith(".tmp")
    store.remove(block(1).key)
    store.trim(0)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [name]
    assert store.bytes == 0


@pytest.mark.parametrize("make", [Path.symlink_to, lambda path, _: os.mkfifo(path)])
def test_what_is_no_file_gives_way_to_a_block(store: PrefixStore, tmp_path: Path, make: Callable[..., None]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    before = elsewhere.stat()
    make(store.path / f"{block().key.hex()}.kv", elsewhere)
    assert store.use([block().key]) == 0
    assert store.put(block(), PARTS)
    assert contents(store, block()) == PARTS
    assert elsewhere.stat() == before


def test_a_list_of_blocks_looks_into_no_link_and_waits_for_no_pipe(store: PrefixStore, tmp_path: Path) -> None:
    store.put(block(), PARTS)
    the_file(store).rename(tmp_path / "elsewhere")
    (store.path / f"{block(1).key.hex()}.kv").symlink_to(tmp_path / "elsewhere")
    assert [entry.head() for entry in store.entries()] == [None]
    os.mkfifo(store.path / f"{block(2).key.hex()}.kv")
    assert [entry.head() for entry in store.entries()] == [None, None]


def test_who_deletes_everything_lets_nobody_exceed_the_quota(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    early = PrefixStore(tmp_path, 3 * SIZE)
    early.put(*big(1))
    for path in tmp_path.iterdir():
        path.unlink()
    late = PrefixStore(tmp_path, 3 * SIZE)
    for number in (2, 3, 4):
        late.put(*big(number))
    for number in (5, 6):
        early.put(*big(number))
    assert early.bytes == late.bytes == on_disk(tmp_path) <= 3 * SIZE
    (tmp_path / "lock").unlink()
    late.put(*big(7))
    assert early.bytes == late.bytes == on_disk(tmp_path) <= 3 * SIZE


def test_a_folder_that_was_deleted_is_made_again(store: PrefixStore) -> None:
    store.put(block(1), PARTS)
    shutil.rmtree(store.path)
    assert contents(store, block(1)) is None
    assert store.put(block(2), PARTS)
    assert store.path.stat().st_mode & 0o777 == 0o700
    assert store.bytes == on_disk(store.path)


def test_where_its_parent_is_gone_too_a_folder_is_not_made_again(tmp_path: Path) -> None:
    """A disk that is not mounted any more: the blocks would go to the one below."""
    disk = tmp_path / "disk"
    store = PrefixStore(disk / "store", 2**20)
    store.put(block(1), PARTS)
    shutil.rmtree(disk)
    with pytest.raises(FileNotFoundError):
        store.put(block(2), PARTS)
    assert not disk.exists()
    disk.mkdir()
    assert store.put(block(2), PARTS)


def test_without_a_descriptor_to_look_with_no_file_is_taken_for_abandoned(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = store.path / "unfinished"
    unfinished.touch()
    assert folder._is_abandoned(unfinished)

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    assert not folder._is_abandoned(unfinished)


def test_an_interrupt_after_a_block_is_whole_leaves_its_bytes_counted(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        rename(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(block(), PARTS)
    assert store.bytes == on_disk(store.path) > 0


@pytest.mark.parametrize("books", [b"", b"x", bytes(8), b"\xff" * 8])
def test_wrong_books_are_put_right(tmp_path: Path, books: bytes) -> None:
    store = PrefixStore(tmp_path, 3 * SIZE)
    store.put(*big(1))
    (tmp_path / "lock").write_bytes(books)
    again = PrefixStore(tmp_path, 3 * SIZE)
    assert again.bytes == SIZE
    (tmp_path / "lock").write_bytes(b"\xff" * 8)
    assert store.put(*big(2))
    assert store.bytes == 2 * SIZE


def test_a_lock_that_another_process_keeps_is_not_waited_for_for_ever(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(block(1), PARTS)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(store.path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        monkeypatch.setattr(folder, "_PATIENCE", 0.1)
        with pytest.raises(ConfigError, match="cannot be used: another process has kept"):
            PrefixStore(store.path)
        with pytest.raises(TimeoutError):
            store.put(block(2), PARTS)
        assert contents(store, block(1)) == PARTS
        monkeypatch.undo()
        holder.communicate()
    assert store.put(block(2), PARTS)
    assert len(PrefixStore(store.path).entries()) == 2


_HOLDER = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("call", ["put", "remove", "trim"])
def test_the_books_change_under_the_lock_of_all_processes(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.put(block(1), PARTS)
    real, refused = store._note, []

    def note(total: int) -> None:
        with (store.path / "lock").open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused.append(total)
        real(total)

    monkeypatch.setattr(store, "_note", note)
    {
        "put": lambda: store.put(block(2), PARTS),
        "remove": lambda: store.remove(block(1).key),
        "trim": lambda: store.trim(0),
    }[call]()
    assert refused


def test_a_removed_block_counts_no_more(store: PrefixStore) -> None:
    store.put(block(), PARTS)
    store.remove(block().key)
    store.remove(block(1).key)
    assert (store.bytes, store.entries()) == (0, [])


# Disks that fail


def test_a_full_disk_leaves_nothing_behind(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(block(1), PARTS)
    before = store.bytes
    real, left = os.write, [100]

    def write(descriptor: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        count = real(descriptor, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(folder.os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        store.put(block(2), PARTS)
    assert store.bytes == before
    assert numbers(store) == {1}
    assert {path.suffix for path in store.path.iterdir()} == {"", ".kv"}
    left[0] = 10_000
    assert store.put(block(2), PARTS)
    assert contents(store, block(2)) == PARTS


def test_a_disk_that_does_nothing_leaves_nothing_for_ever(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        for name in ("ftruncate", "unlink"):
            failing.setattr(folder.os, name, refuse)
        with pytest.raises(OSError, match="Input/output"):
            store.put(block(), PARTS)
    assert list(store.path.glob("*.tmp"))
    assert PrefixStore(store.path, 2**20).bytes == 0
    assert not list(store.path.glob("*.tmp"))


def test_a_disk_that_cannot_be_read_is_a_miss(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(block(), PARTS)

    def readv(descriptor: int, buffers: list[memoryview]) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder.os, "readv", readv)
    assert contents(store, block()) is None
    assert store.entries() == []


def test_a_file_that_vanishes_while_it_is_found_is_a_miss(store: PrefixStore) -> None:
    store.put(block(), PARTS)
    store.announce(block().key)
    assert store.find([block().key]) == 1
    the_file(store).unlink()
    store.announce(block().key)
    assert contents(store, block()) is None
    assert store.use([block().key]) == 0


# Several processes

_WRITER = """
import os, random, sys
from vattn.store.blockfile import Block
from vattn.store.folder import PrefixStore
path, seed, puts, size, most = sys.argv[1], *map(int, sys.argv[2:])
store, rng, wrong = PrefixStore(path, most), random.Random(seed), 0
print("ready", flush=True)
for _ in range(puts):
    number = rng.randrange(24)
    block = Block(bytes(32), number.to_bytes(32), 0, [number])
    parts = [bytes([number]) * size, bytes([number + 100]) * 10]
    if rng.random() < 0.5:
        store.put(block, parts)
    else:
        found = store.read(block)
        wrong += found is not None and list(map(bytes, found)) != parts
print(wrong, store.rejected, flush=True)
"""


def writer(path: Path, seed: int, puts: int, size: int, most: int) -> subprocess.Popen[str]:
    arguments = [str(path), *map(str, (seed, puts, size, most))]
    return subprocess.Popen([sys.executable, "-c", _WRITER, *arguments], stdout=subprocess.PIPE, text=True)


def on_disk(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir() if each.name != "lock")


def test_two_processes_keep_one_quota_and_serve_nothing_wrong(tmp_path: Path) -> None:
    path, size, most = tmp_path / "store", 3000, 20_000
    both = [writer(path, seed, effort(300, 5000), size, most) for seed in (1, 2)]
    for process in both:
        assert process.communicate()[0].split() == ["ready", "0", "0"]
    assert on_disk(path) <= most
    store = PrefixStore(path, most)
    assert store.bytes == on_disk(path)
    assert store.entries()


def test_a_process_that_is_killed_while_it_writes_leaves_no_broken_block_and_no_lost_byte(tmp_path: Path) -> None:
    path, size, most = tmp_path / "store", 2**20, 12 * 2**20
    rng = random.Random(3)
    for seed in range(effort(6, 200)):
        process = writer(path, seed, 10**9, size, most)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.random() * 0.05)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        assert on_disk(path) <= most
        store = PrefixStore(path, most)
        assert not list(path.glob("*.tmp")), "whoever counts deletes what was left"
        assert store.bytes == on_disk(path)
        for entry in store.entries():
            number = int(entry.key, 16)
            found = store.read(Block(bytes(32), number.to_bytes(32), 0, [number]))
            assert found is not None
            assert list(map(bytes, found)) == [bytes([number]) * size, bytes([number + 100]) * 10]


def test_what_another_is_writing_is_not_taken_for_left_behind(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.write, []

    def write(descriptor: int, data: memoryview) -> int:
        other = PrefixStore(store.path, 2**20)
        seen.append((len(list(store.path.glob("*.tmp"))), other.bytes))
        return real(descriptor, data)

    monkeypatch.setattr(folder.os, "write", write)
    assert store.put(block(), PARTS)
    monkeypatch.undo()
    assert set(seen) == {(1, store.bytes)}, "it is there, and counts as it will be"
    assert contents(store, block()) == PARTS
