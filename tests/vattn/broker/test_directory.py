"""Published blocks: what is found is what was published, and nobody's pages are used again while others map them,
whoever is killed at whatever point.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import secrets
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support import forks
from tests.support.effort import effort
from vattn.broker import directory as module
from vattn.broker.directory import Directory, NoDirectory, OwnDirectory, Shape, read_only
from vattn.broker.kept import Kept, problems

PAGE = 4096
SHAPE = Shape(b"f" * 32, PAGE, 4, 2, 64)
TOKENS = [1, 2, 3, 4]


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.fixture
def mine() -> Iterator[OwnDirectory]:
    with closing(OwnDirectory.make(SHAPE)) as made:
        yield made


def reader(of: OwnDirectory) -> closing[Directory]:
    return closing(Directory(read_only(of.fileno())))


def test_what_was_published_is_found(mine: OwnDirectory) -> None:
    with reader(mine) as other:
        numbers = [mine.add(key(i), [i, 2, 3, 4], [2 * i * PAGE, (2 * i + 1) * PAGE]) for i in range(1, 40)]
        for i, number in enumerate(numbers, 1):
            assert other.find(key(i)) == number
            assert number is not None
            entry = other.read(number)
            assert entry is not None
            assert (entry.key, list(entry.tokens)) == (key(i), [i, 2, 3, 4])
            assert list(entry.offsets) == [2 * i * PAGE, (2 * i + 1) * PAGE]
        assert [number for number, _ in other.entries()] == numbers
        assert other.find(key(1000)) is None
        assert (other.pid, other.shape, other.identity) == (os.getpid(), SHAPE, mine.identity)


def test_a_block_that_somebody_has_pinned_is_not_given_up(mine: OwnDirectory) -> None:
    number = mine.add(key(1), TOKENS, [0, PAGE])
    assert number is not None
    with reader(mine) as one, reader(mine) as other:
        assert one.pin(number)
        assert other.pin(number)
        assert not mine.remove(number)
        one.unpin(number)
        assert mine.pinned() == {number}
        assert not mine.remove(number)
        assert one.read(number) is not None
        other.close()  # as when its process is killed
        assert mine.remove(number)
        assert one.find(key(1)) is None
        assert one.read(number) is None
        assert mine.add(key(2), TOKENS, [0, PAGE]) == number


def test_neighbours_are_pinned_and_read_together(mine: OwnDirectory) -> None:
    numbers = [mine.add(key(1 + i), [i, 2, 3, 4], [0, PAGE]) for i in range(5)]
    assert numbers == list(range(5))
    with reader(mine) as other:
        assert other.pin(1, 3)
        assert mine.pinned() == {1, 2, 3}
        assert [mine.remove(number) for number in range(5)] == [True, False, False, False, True]
        other.unpin(2)
        assert [mine.remove(number) for number in (1, 2, 3)] == [False, True, False]
        entries = [other.read(number) for number in range(SHAPE.capacity + 3)]
        assert [number for number, entry in enumerate(entries) if entry is not None] == [1, 3]
        assert [entry.tokens[0] for entry in entries if entry] == [1, 3]


@pytest.mark.parametrize("wrong", ["nothing", "a key", "tokens", "a byte", "removed", "too few tokens", "the end"])
def test_offsets_go_as_far_as_keys_and_tokens_and_checksums_agree(mine: OwnDirectory, wrong: str) -> None:
    count = SHAPE.capacity if wrong == "the end" else 6
    blocks = [[i, 2, 3, 4] for i in range(count)]
    for i, tokens in enumerate(blocks):
        mine.add(key(1 + i), tokens, [2 * i * PAGE, (2 * i + 1) * PAGE])
    keys = [key(1 + i) for i in range(count)]
    ids = array("q", [token for tokens in blocks for token in tokens])
    expected = {"nothing": 6, "too few tokens": 5, "the end": count}.get(wrong, 3)
    if wrong == "a key":
        keys[3] = key(99)
    elif wrong == "tokens":
        ids[3 * 4 + 3] = 7
    elif wrong == "a byte":  # of an offset, which no key vouches for
        os.pwrite(mine.fileno(), b"\x01", mine._at(3) + SHAPE.entry_bytes - 8 - 8)
    elif wrong == "removed":
        assert mine.remove(3)
    elif wrong == "too few tokens":
        del ids[-1:]
    elif wrong == "the end":
        keys, ids = [*keys, key(99)], ids + array("q", [count, 2, 3, 4])
    with reader(mine) as other:
        found = other.offsets(0, keys, ids.tobytes())
        assert list(array("q", found)) == [i * PAGE for i in range(2 * expected)]
        assert other.offsets(2, keys[2:], ids[8:].tobytes()) == found[2 * 2 * 8 :]
        assert other.offsets(SHAPE.capacity + 3, keys, ids.tobytes()) == b""


@pytest.mark.parametrize("in_part", [False, True])
@pytest.mark.parametrize("failed", [1, 2], ids=["the first write", "the second write"])
def test_a_block_that_could_not_be_published_is_found_nowhere(
    mine: OwnDirectory, monkeypatch: pytest.MonkeyPatch, failed: int, in_part: bool
) -> None:
    """Neither by its bucket nor as a neighbour; its number is the next one's."""
    mine.add(key(1), TOKENS, [0, PAGE])
    real, writes = os.pwrite, 0

    def failing(file: int, data: bytes, at: int) -> int:
        nonlocal writes
        writes += at >= module._BUCKETS
        if writes == failed and in_part and len(data) == SHAPE.entry_bytes:
            return real(file, data[:-16], at)
        if writes == failed:
            raise OSError(errno.ENOSPC, "no memory")
        return real(file, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing)
        with pytest.raises(OSError, match=r"no memory|in part"):
            mine.add(key(2), TOKENS, [2 * PAGE, 3 * PAGE])
    with reader(mine) as other:
        assert other.find(key(2)) is None
        assert other.read(1) is None
        assert len(other.offsets(0, [key(1), key(2)], array("q", 2 * TOKENS).tobytes())) == 2 * 8
    assert mine.add(key(3), TOKENS, [2 * PAGE, 3 * PAGE]) == 1


def test_all_of_a_range_is_pinned_or_nothing(mine: OwnDirectory) -> None:
    for i in range(4):
        mine.add(key(1 + i), TOKENS, [0, PAGE])
    with reader(mine) as other, closing(OwnDirectory(os.open(f"/proc/self/fd/{mine.fileno()}", os.O_RDWR))) as taker:
        assert taker._lock(fcntl.F_WRLCK, 2)  # as in the midst of `remove`
        assert not other.pin(0, 4)
        assert taker.pinned() == set()
        assert other.pin(0, 2)
        assert taker.pinned() == {0, 1}


def test_entries_are_alike_as_far_as_they_have_the_keys(mine: OwnDirectory) -> None:
    keys = [key(i) for i in range(1, 7)]
    for each in keys[:4]:
        mine.add(each, TOKENS, [0, PAGE])
    with reader(mine) as other:
        assert other.alike(0, keys) == 4
        assert other.alike(1, keys[1:3]) == 2
        assert other.alike(1, keys) == 0
        assert other.alike(SHAPE.capacity - 1, keys) == other.alike(SHAPE.capacity + 5, keys) == 0
        mine.remove(2)
        assert other.alike(0, keys) == 2


def test_a_hidden_block_is_looked_for_no_more_and_stays_what_it_is(mine: OwnDirectory) -> None:
    number = mine.add(key(1), TOKENS, [0, PAGE])
    assert number is not None
    with reader(mine) as other:
        other.pin(number)
        mine.hide(number)
        assert other.withdrawals == 0
        assert other.find(key(1)) is None
        entry = other.read(number)
        assert entry is not None
        assert entry.key == key(1)
        again = mine.add(key(1), TOKENS, [2 * PAGE, 3 * PAGE])
        assert again not in (None, number)
        assert not mine.remove(number)
        other.unpin(number)
        assert mine.remove(number)
        assert other.find(key(1)) == again


def test_a_hidden_block_is_shown_again_unless_it_was_withdrawn_or_another_has_its_key(mine: OwnDirectory) -> None:
    numbers = [mine.add(key(i), TOKENS, [0, PAGE]) for i in range(1, 4)]
    hidden, withdrawn, replaced = (number for number in numbers if number is not None)
    with reader(mine) as other:
        for number in (hidden, withdrawn, replaced):
            mine.hide(number)
        mine.withdraw(withdrawn)
        again = mine.add(key(3), TOKENS, [2 * PAGE, 3 * PAGE])
        for i, number in enumerate((hidden, withdrawn, replaced), 1):
            mine.show(number, key(i))
            mine.show(number, key(i))
        assert [other.find(key(i)) for i in range(1, 4)] == [hidden, None, again]
        for number in (hidden, withdrawn, replaced):
            assert mine.remove(number)
        assert [other.find(key(i)) for i in range(1, 4)] == [None, None, again]


def test_the_tokens_of_a_removed_block_stay_until_another_has_its_place(mine: OwnDirectory) -> None:
    number, other = (mine.add(key(i), TOKENS, [0, PAGE]) for i in range(1, 3))
    assert number is not None
    assert other is not None
    mine.remove(number)
    mine.withdraw(other)
    mine.remove(other)
    assert mine.removed_tokens(number, key(1)) == array("q", TOKENS)
    assert mine.removed_tokens(number, key(2)) is None
    assert mine.removed_tokens(other, key(2)) is None  # it was wrong
    while mine.add(key(3), TOKENS, [0, PAGE]) != number:
        pass
    assert mine.removed_tokens(number, key(1)) is None


def test_a_withdrawn_block_is_found_no_more_and_stays_pinned(mine: OwnDirectory) -> None:
    number = mine.add(key(1), TOKENS, [0, PAGE])
    assert number is not None
    with reader(mine) as other:
        other.pin(number)
        mine.withdraw(number)
        assert other.withdrawals == 1
        assert other.find(key(1)) is None
        entry = other.read(number)
        assert entry is not None  # its pages are still where they were
        assert entry.key != key(1)
        assert not mine.remove(number)
        other.unpin(number)
        assert mine.remove(number)


def test_a_directory_that_claims_more_entries_than_memory_is_read_at_once() -> None:
    """Whatever a process says, others spend no more time on it than it spent memory."""
    with closing(OwnDirectory.make(replace(SHAPE, capacity=2**36))) as made:
        numbers = [made.add(key(i), TOKENS, [0, PAGE]) for i in range(1, 4)]
        far = 2**35 + 7
        made._write(far, key(9), 1, TOKENS, [0, PAGE])
        os.pwrite(made.fileno(), (2**36).to_bytes(8, "little"), module._FRESH)
        assert [number for number, _ in made.entries()] == [*numbers, far]


def test_there_is_room_for_so_many_entries_and_no_more() -> None:
    with closing(OwnDirectory.make(Shape(b"f" * 32, PAGE, 4, 2, 8))) as mine:
        numbers = [mine.add(key(i), TOKENS, [0, PAGE]) for i in range(1, 20)]
        assert sum(number is not None for number in numbers) <= 8
        assert None in numbers
        assert mine.remove(0)
        assert mine.add(key(99), TOKENS, [0, PAGE]) == 0


@pytest.mark.parametrize("number", range(SHAPE.entry_bytes))
def test_an_entry_with_a_changed_byte_is_none(mine: OwnDirectory, number: int) -> None:
    mine.add(key(1), TOKENS, [0, PAGE])
    at = SHAPE.entries_at + number
    os.pwrite(mine.fileno(), bytes([os.pread(mine.fileno(), 1, at)[0] ^ 1]), at)
    assert mine.read(0) is None


def test_only_a_sealed_directory_is_one() -> None:
    files = [
        os.memfd_create("other"),
        os.memfd_create("sealable", os.MFD_ALLOW_SEALING),
        os.open("/dev/null", os.O_RDWR),
    ]
    with closing(OwnDirectory.make(SHAPE)) as mine:
        os.pwrite(files[1], os.pread(mine.fileno(), SHAPE.num_bytes, 0), 0)
        for changed in (0, 8, 60, 70):  # of its head
            before = os.pread(mine.fileno(), 4, changed)
            os.pwrite(mine.fileno(), b"\xff\xff\xff\xff", changed)
            if changed != 60:
                files.append(os.dup(mine.fileno()))
                with pytest.raises(NoDirectory):
                    Directory(files[-1])
            os.pwrite(mine.fileno(), before, changed)
    for file in files[:3]:
        with pytest.raises(NoDirectory):
            Directory(file)
    for file in files:
        os.close(file)


def test_what_an_ended_process_leaves_is_its_published_pages(mine: OwnDirectory) -> None:
    memory = os.memfd_create("memory")
    for page in range(8):
        os.pwrite(memory, bytes([page + 1]) * PAGE, page * PAGE)
    mine.add(key(1), TOKENS, [2 * PAGE, 3 * PAGE])
    mine.add(key(2), TOKENS, [6 * PAGE, 5 * PAGE])
    assert list(problems(mine, memory)) == []
    kept = Kept(os.dup(memory), OwnDirectory(os.dup(mine.fileno())))
    while kept.tidy():
        pass
    assert kept.bytes == 4 * PAGE
    pages = [os.pread(memory, 1, page * PAGE)[0] for page in range(8)]
    assert pages == [0, 0, 3, 4, 0, 6, 7, 0]
    with reader(mine) as other:
        other.pin(0)
        kept.look()
        assert kept.evictable == 2 * PAGE
        assert kept.evict(8 * PAGE) == 2 * PAGE
        assert not kept.gone
        other.unpin(0)
        assert kept.evict(1) == 2 * PAGE
        assert kept.gone
        assert kept.bytes == 0
    kept.close()
    os.close(memory)


def test_what_a_living_process_has_left_is_gone_when_nothing_is_in_its_file(mine: OwnDirectory) -> None:
    memory = os.memfd_create("memory")
    for page in range(3):
        os.pwrite(memory, b"x" * PAGE, page * PAGE)
    mine.add(key(1), TOKENS, [0, PAGE])
    kept = Kept(memory, OwnDirectory(os.dup(mine.fileno())), os.pidfd_open(os.getpid()))
    assert not kept.gone
    assert kept.evict(2 * PAGE) == 2 * PAGE
    assert not kept.gone  # the process still has a page
    kept._punch(2 * PAGE, PAGE)
    assert kept.gone
    kept.close()


def test_pages_that_are_published_twice_or_are_not_there_are_told(mine: OwnDirectory) -> None:
    memory = os.memfd_create("memory")
    os.ftruncate(memory, 4 * PAGE)
    mine.add(key(1), TOKENS, [0, PAGE])
    mine.add(key(2), TOKENS, [PAGE, 2 * PAGE])
    mine.add(key(3), TOKENS, [3 * PAGE, 4 * PAGE])
    assert list(problems(mine, memory)) == [
        "a page of entry 1 is published twice",
        "a page of entry 2 is not in its file",
    ]
    os.close(memory)


class Killed(BaseException):
    """Ends a process in the midst of writing."""


@dataclass
class Owner:
    """A process that publishes, with the pages of its memory: what each holds, and which nobody needs."""

    directory: OwnDirectory
    pages: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    blocks: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # by entry: what it holds, and where
    withdrawn: dict[int, list[int]] = field(default_factory=dict)
    alive: bool = True

    def take(self, content: int) -> int:
        if not self.free:
            self.pages.append(0)
            self.free.append(len(self.pages) - 1)
        page = self.free.pop()
        self.pages[page] = content
        return page

    def give_up(self, pages: list[int]) -> None:
        for page in pages:
            self.pages[page] = -1  # at once, as the next request would
        self.free += pages


@dataclass
class Reader:
    """A process that maps what others have published."""

    views: dict[int, Directory] = field(default_factory=dict)  # by owner
    seen: tuple[int, int, int] | None = None  # an owner's entry that was found, not pinned yet, for some content
    pinned: list[tuple[int, int]] = field(default_factory=list)
    mapped: dict[tuple[int, int], tuple[int, list[int]]] = field(default_factory=dict)


def content_key(content: int) -> bytes:
    return key(content + 1)


class Sharing(RuleBasedStateMachine):
    """Two processes that publish, two that map, and a broker that takes over; each may be killed at any point, the
    publishers also between any two writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[Owner] = []
        self.readers = [Reader(), Reader()]
        self.start_owner()
        self.start_owner()

    def start_owner(self) -> None:
        self.owners.append(Owner(OwnDirectory.make(SHAPE)))

    def teardown(self) -> None:
        for each in self.readers:
            for view in each.views.values():
                view.close()
        for owner in self.owners:
            owner.directory.close()

    def killing(self, owner: Owner, after: int | None, act: Callable[[], None]) -> None:
        """Does something, and has the owner end after so many of its writes; the broker has its files from then on."""
        write, left = os.pwrite, [after]

        def counted(file: int, data: bytes, at: int) -> int:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return write(file, data, at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.os, "pwrite", counted)
            try:
                act()
                if after is None:
                    return
            except Killed:
                pass
        self.end(owner)

    def end(self, owner: Owner) -> None:
        """The broker takes over: it knows nothing but what the directory says."""
        owner.alive = False
        inherited = OwnDirectory(os.dup(owner.directory.fileno()))
        owner.directory.close()
        owner.directory, owner.withdrawn = inherited, {}
        owner.blocks = {number: (entry.tokens[0], list(entry.offsets)) for number, entry in inherited.entries()}
        used = {page for _, pages in owner.blocks.values() for page in pages}
        owner.give_up([page for page in range(len(owner.pages)) if page not in used and page not in owner.free])

    moments = st.one_of(st.none(), st.integers(0, 5))
    contents = st.integers(0, 5)
    which = st.integers(0, 1)

    @rule(at=st.randoms(use_true_random=False), content=contents, after=moments)
    def publish(self, at: random.Random, content: int, after: int | None) -> None:
        owner = at.choice([owner for owner in self.owners if owner.alive])

        def act() -> None:
            if owner.directory.find(content_key(content)) is not None:
                return
            pages = [owner.take(content), owner.take(content)]
            number = owner.directory.add(content_key(content), [content, *TOKENS[1:]], pages)
            assert number is not None
            assert number not in owner.blocks.keys() | owner.withdrawn.keys()
            owner.blocks[number] = content, pages

        self.killing(owner, after, act)
        if not owner.alive:
            self.start_owner()

    @rule(at=st.randoms(use_true_random=False), after=moments)
    def evict(self, at: random.Random, after: int | None) -> None:
        owner = at.choice(self.owners)  # the broker evicts as well

        def act() -> None:
            for number in [*owner.blocks]:
                if owner.directory.remove(number):
                    owner.give_up(owner.blocks.pop(number)[1])
                    return

        self.killing(owner, after if owner.alive else None, act)
        if all(not each.alive for each in self.owners):
            self.start_owner()

    @rule(at=st.randoms(use_true_random=False), after=moments)
    def withdraw(self, at: random.Random, after: int | None) -> None:
        owner = at.choice([owner for owner in self.owners if owner.alive])

        def act() -> None:
            for number in [*owner.withdrawn]:
                if owner.directory.remove(number):
                    owner.give_up(owner.withdrawn.pop(number))
            for number in [*owner.blocks][:1]:
                owner.withdrawn[number] = owner.blocks.pop(number)[1]
                owner.directory.withdraw(number)

        self.killing(owner, after, act)
        if not owner.alive:
            self.start_owner()

    @rule(at=st.randoms(use_true_random=False), after=moments)
    def hide(self, at: random.Random, after: int | None) -> None:
        owner = at.choice([owner for owner in self.owners if owner.alive])

        def act() -> None:
            for number, (content, _) in [*owner.blocks.items()][:1]:
                owner.directory.hide(number)
                assert owner.directory.find(content_key(content)) != number

        self.killing(owner, after, act)
        if not owner.alive:
            self.start_owner()

    @rule(who=which, content=contents, at=st.randoms(use_true_random=False))
    def find(self, who: int, content: int, at: random.Random) -> None:
        each, place = self.readers[who], at.randrange(len(self.owners))
        there = [(i, held) for i, owner in enumerate(self.owners) for held, _ in owner.blocks.values()]
        if there and at.random() < 0.8:
            place, content = at.choice(there)
        if place not in each.views:
            each.views[place] = Directory(read_only(self.owners[place].directory.fileno()))
        number = each.views[place].find(content_key(content))
        each.seen = None if number is None else (place, number, content)

    @precondition(lambda self: any(each.seen for each in self.readers))
    @rule(count=st.integers(1, 4))
    def pin(self, count: int) -> None:
        for each in self.readers:
            if each.seen is None:
                continue
            (place, number, content), each.seen = each.seen, None
            view = each.views[place]
            if not view.pin(number, count):
                continue
            for at, entry in ((at, view.read(at)) for at in range(number, number + count)):
                if (place, at) in each.mapped:
                    continue
                wanted = content if at == number else entry and entry.tokens[0]
                if entry is None or entry.key != content_key(wanted) or entry.tokens[0] != wanted:
                    view.unpin(at)
                    continue
                each.mapped[place, at] = wanted, list(entry.offsets)

    @rule(who=which)
    def release(self, who: int) -> None:
        each = self.readers[who]
        for place, number in [*each.mapped][:1]:
            del each.mapped[place, number]
            each.views[place].unpin(number)

    @rule(who=which)
    def kill_reader(self, who: int) -> None:
        for view in self.readers[who].views.values():
            view.close()
        self.readers[who] = Reader()

    @invariant()
    def what_is_mapped_stays_as_it_was(self) -> None:
        for each in self.readers:
            for (place, _), (content, pages) in each.mapped.items():
                assert [self.owners[place].pages[page] for page in pages] == [content, content]

    @invariant()
    def no_page_is_published_twice(self) -> None:
        for owner in self.owners:
            pages = [page for _, entry in owner.directory.entries() for page in entry.offsets]
            assert len(pages) == len(set(pages))
            assert not set(pages) & set(owner.free)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=effort(60, 2000), stateful_step_count=40, deadline=None)


def test_a_child_has_none_of_it_open(mine: OwnDirectory) -> None:
    number = mine.add(secrets.token_bytes(32), TOKENS, [0, PAGE])
    assert number is not None
    with reader(mine) as other:
        other.pin(number)
        assert forks.status(lambda: not (mine.fileno() == other.fileno() == -1)) == 0
        assert not mine.remove(number)
