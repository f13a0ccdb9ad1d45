"""Blocks of one process that others map, each of which may end at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from tests.support import brokers, forks, scripts
from tests.support.effort import effort
from tests.support.waiting import wait_until
from vattn import _native
from vattn.broker.directory import Directory, OwnDirectory
from vattn.pool import shares as shares_module
from vattn.pool.journal import Change
from vattn.pool.lent import LentCore
from vattn.pool.shares import Shares
from vattn.prefix import block_keys, root_key
from vattn.slots.blocks import PageBlock, SharedBlocks

pytestmark = pytest.mark.slow(1)

PAGE = 4096
PAGES = 256
BLOCK = 16  # tokens; two pages
PRINT = b"f" * 32
PROMPT = list(range(20 * BLOCK))


@pytest.fixture
def broker() -> Iterator[brokers.Process]:
    with brokers.running(PAGES * PAGE) as process:
        yield process


class Engine:
    """A cache on a pool that shares its prefixes."""

    def __init__(self, label: str, fingerprint: bytes | None = PRINT, **options: Any) -> None:
        zeroes = options.get("zero_on_free", False)
        self.pool = vattn.PagePool.connect(
            brokers.NAME, label=label, page_size=PAGE, zero_on_free=zeroes, fingerprint=fingerprint
        )
        shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32, "layout": "layer"}
        sizes = {"max_batch_size": 8, "max_context_len": PAGES * BLOCK}
        self.config = vattn.KVConfig(**{**shape, **sizes, **options})
        try:
            self.kv = vattn.KVCache(self.config, pool=self.pool)
        except BaseException:
            self.pool.close()
            raise

    @property
    def shares(self) -> Shares:
        assert isinstance(self.pool._core, LentCore)
        assert self.pool._core.shares is not None
        return self.pool._core.shares

    def compute(self, prompt: list[int], salt: bytes = b"", value: float = 1.0) -> tuple[int, int]:
        """Admits a prompt, computes what is missing, commits it; its slot, and how many tokens were cached."""
        slot, cached = self.kv.admit(prompt, salt)
        try:
            self.kv.step({slot: len(prompt)})
        except vattn.OutOfPages:
            self.kv.free_reqid(slot)
            raise
        keys, values = self.kv.layer(0)
        for at in range(cached, len(prompt)):
            keys[slot, at] = prompt[at] * value
            values[slot, at] = -prompt[at] * value
        self.kv.commit(slot, prompt)
        return slot, cached

    def publish(self, prompt: list[int], **options: Any) -> int:
        slot, _ = self.compute(prompt, **options)
        wait_until(lambda: sum(1 for _ in self.shares.directory.entries()) >= len(prompt) // BLOCK)
        return slot

    def says(self, slot: int, prompt: list[int], value: float = 1.0) -> bool:
        keys, values = self.kv.layer(0)
        wanted = torch.tensor(prompt, dtype=torch.float32)[:, None, None] * value
        return bool((keys[slot, : len(prompt)] == wanted).all() and (values[slot, : len(prompt)] == -wanted).all())

    def meets(self, count: int = 1) -> None:
        wait_until(lambda: len(self.shares.peers) >= count)

    def close(self) -> None:
        self.kv.close()
        self.pool.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def engines(*labels: str, **options: Any) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Engine(label, **options)) for label in labels]


_PUBLISHER = f"""
import sys, time
sys.path.append({str(Path(__file__).parents[3])!r})
from tests.vattn.pool.test_shares import Engine, PROMPT
engine = Engine("publisher")
engine.publish(PROMPT)
print("ready", file=sys.stderr, flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def publisher() -> Iterator[scripts.Process]:
    process = scripts.start(_PUBLISHER)
    assert process.stderr is not None
    try:
        assert process.stderr.readline() == "ready\n", process.stderr.read()
        yield process
    finally:
        kill(process)
        process.stderr.close()


def kill(process: scripts.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait()


def test_what_one_has_computed_others_map(broker: brokers.Process) -> None:
    """Also those that come later, and what a third has added; each page is counted once."""
    with engines("a", "b") as (a, b):
        a.publish(PROMPT)
        b.meets()
        longer = [*PROMPT, *range(5, 5 + 3 * BLOCK)]
        slot, cached = b.compute([*longer, 1])
        assert cached == len(PROMPT)
        assert b.says(slot, longer)
        assert b.kv.stats().owned_pages == 2 * 4  # what it has computed itself
        wait_until(lambda: (broker.borrower("b") or {})["shared"] == 40 * PAGE)
        wait_until(lambda: sum(1 for _ in b.shares.directory.entries()) == 3)
        for each in (a, b):
            each.kv.check()
        assert broker.problems() == []
        found = [(broker.borrower(name) or {})["found"] for name in "ab"]
        assert found[0] <= 48 * PAGE
        assert found[1] <= 24 * PAGE
        with Engine("c") as c:
            c.meets(2)
            slot, cached = c.compute([*longer, 2])
            assert cached == len(longer)
            assert c.says(slot, longer)
            c.kv.check()


def test_a_pool_is_publishing_until_the_last_block_is_there(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine("a") as a:
        said: list[bool] = []
        publish = a.shares.publish

        def slowly(*arguments: Any) -> Any:
            said.append(a.pool.publishing)
            return publish(*arguments)

        monkeypatch.setattr(a.shares, "publish", slowly)
        assert not a.pool.publishing
        a.publish(PROMPT)
        wait_until(lambda: not a.pool.publishing)
        assert said == [True] * 20


def test_a_pool_ends_publishing_without_a_call_that_does_what_was_deferred(broker: brokers.Process) -> None:
    with Engine("a") as a:
        core = a.pool._core
        with core.lock:
            a.compute(PROMPT)
            core.postpone(lambda: None)
            assert not core.settled
        wait_until(lambda: not a.pool.publishing)
        assert core.settled


@pytest.mark.parametrize("error", [OSError, RuntimeError, vattn.VattnError])
def test_what_fails_while_prefixes_are_looked_after_is_done_again(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    failures = []

    def fails(*_: Any) -> None:
        failures.append(error)
        raise error("broken")

    with Engine("a") as a:
        monkeypatch.setattr(a.shares, "publish", fails)
        a.compute(PROMPT)
        wait_until(lambda: len(failures) > 1)
        assert a.pool.publishing
        monkeypatch.undo()
        wait_until(lambda: not a.pool.publishing)
        assert sum(1 for _ in a.shares.directory.entries()) == 20
        a.kv.check()
    assert caplog.text.count("pool 'tested': sharing prefixes fails; trying again") == 1
    caplog.clear()  # the records have what failed


def test_a_peer_that_comes_in_a_time_without_descriptors_is_not_met(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come later are."""
    came: list[tuple[int, int]] = []
    with Engine("b") as b:
        core = b.pool._core
        assert isinstance(core, LentCore)
        before = _memories()
        monkeypatch.setattr(core, "meet", lambda *files: came.append(files))
        with Engine("a") as a:
            wait_until(lambda: came)
            monkeypatch.undo()
            with core.lock, monkeypatch.context() as patch:  # its thread waits
                opened = _native.open_foreign_file
                patch.setattr(_native, "open_foreign_file", lambda page, _: opened(page, -1))  # none is left
                core.meet(*came.pop())
                assert not core.tend()
            assert not core._met
            assert not b.shares.peers
            a.publish(PROMPT)
        assert _memories() == before
        with Engine("c") as c:
            c.publish(PROMPT)
            b.meets()
            assert b.compute([*PROMPT, 1])[1] == len(PROMPT)


def test_the_shared_pages_are_the_same_memory(broker: brokers.Process) -> None:
    """Each process has a proportional share of them."""
    with publisher(), Engine("b") as b:
        b.meets()
        before = _pss(os.getpid())
        slot, cached = b.compute([*PROMPT, 1])
        assert cached == len(PROMPT)
        assert b.says(slot, PROMPT)
        own = (b.kv.stats().created_bytes) // 1024
        assert _pss(os.getpid()) - before <= own + 40 * PAGE // 2 // 1024 + 4


def _pss(pid: int) -> int:
    """KiB of the mappings of caches."""
    total, cache = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            cache = "/memfd:vattn" in line
        elif cache and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total


def test_shared_pages_cannot_be_written(broker: brokers.Process) -> None:
    with publisher(), Engine("b") as b:
        b.meets()
        slot, _ = b.compute([*PROMPT, 1])
        assert forks.status(lambda: 0) == 0  # a child has none of it, and takes none with it
        for peer in b.shares.peers:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(peer.directory.fileno(), b"x", 0)
        assert b.says(slot, PROMPT)


@pytest.mark.parametrize(
    ("change", "cached"),
    [
        ({"salt": b"tenant"}, 0),
        ({"prompt": [1, *PROMPT[1:]]}, 0),
        ({"prompt": [*PROMPT[: 5 * BLOCK], *PROMPT]}, 5 * BLOCK),
        ({"prompt": PROMPT}, len(PROMPT) - BLOCK),  # a token is left to compute
    ],
)
def test_only_the_same_tokens_under_the_same_salt_are_found(
    broker: brokers.Process, change: dict[str, Any], cached: int
) -> None:
    with engines("a", "b") as (a, b):
        a.publish(PROMPT)
        b.meets()
        prompt = change.get("prompt", PROMPT)
        slot, found = b.compute(prompt, salt=change.get("salt", b""))
        assert found == cached
        assert b.says(slot, prompt)


@pytest.mark.parametrize(
    "other", [{"fingerprint": b"g" * 32}, {"fingerprint": None}, {"layout": "fused"}, {"dtype": torch.float64}]
)
def test_another_fingerprint_or_layout_is_a_miss(broker: brokers.Process, other: dict[str, Any]) -> None:
    with engines("a", "like-a") as (a, like_a), Engine("b", **other) as b:
        a.publish(PROMPT)
        like_a.meets()  # so that the broker knows what there is of a, and tells b of it first if at all
        with Engine("like-b", **other) as like_b:
            if other.get("fingerprint", PRINT) is not None:
                wanted = like_b.shares.directory.identity
                wait_until(lambda: wanted in [peer.directory.identity for peer in b.shares.peers])
                assert len(b.shares.peers) == 1
            assert b.compute(PROMPT)[1] == 0


def test_a_collision_of_keys_is_a_miss(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines("a", "b") as (a, b):
        a.publish(PROMPT)
        b.meets()
        true = vattn.slots.exchange.block_keys
        wanted = list(true(vattn.prefix.root_key(b""), PROMPT, BLOCK))
        monkeypatch.setattr("vattn.slots.exchange.block_keys", lambda *_: iter(wanted))
        assert b.compute([7, *PROMPT])[1] == 0


def test_a_prefix_is_pinned_by_a_few_locks(broker: brokers.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "_RUN", 8)
    with engines("a", "b") as (a, b):
        a.publish(PROMPT)
        b.meets()
        ranges, pin = [], Directory.pin
        monkeypatch.setattr(Directory, "pin", lambda self, *which: ranges.append(which) or pin(self, *which))
        slot, cached = b.compute([*PROMPT, 1])
        assert cached == len(PROMPT)
        assert b.says(slot, PROMPT)
        assert sum(count for _, count in ranges) == len(PROMPT) // BLOCK
        assert len(ranges) == 3
        assert len(a.shares.directory.pinned()) == len(PROMPT) // BLOCK


@pytest.mark.parametrize("what", ["taken", "about to be taken", "of other tokens", "of no pages"])
def test_a_block_that_leaves_while_a_prefix_is_looked_up_ends_it(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with engines("a", "b") as (a, b):
        a.kv.free_reqid(a.publish(PROMPT))
        b.meets()
        alike, done = Directory.alike, []
        mine = a.shares.directory
        taker = OwnDirectory(os.open(f"/proc/self/fd/{mine.fileno()}", os.O_RDWR))

        def then_it_leaves(self: Directory, number: int, keys: Any) -> int:
            count = alike(self, number, keys)
            if not done:
                done.append(number)
                if what == "taken":
                    assert taker.remove(number + 7)
                elif what == "about to be taken":
                    assert taker._lock(fcntl.F_WRLCK, number + 7)
                else:
                    entry = mine.read(number + 7)
                    assert entry is not None
                    tokens, offsets = list(entry.tokens), list(entry.offsets)
                    if what == "of other tokens":
                        tokens[-1] += 1
                    else:
                        offsets[-1] = PAGE << 40  # which the file does not have
                    taker._write(number + 7, entry.key, entry.published, tokens, offsets)
            return count

        monkeypatch.setattr(Directory, "alike", then_it_leaves)
        slot, cached = b.compute([*PROMPT, 1])
        assert cached == 7 * BLOCK
        assert b.says(slot, PROMPT)
        assert len(taker.pinned()) == 7
        b.kv.check()
        taker.close()


def test_a_block_that_is_missing_among_others_ends_a_prefix(broker: brokers.Process) -> None:
    """Also where the entry after it is still there, so that the run looks whole at first."""
    with engines("a", "b") as (a, b):
        a.kv.free_reqid(a.publish(PROMPT))
        b.meets()
        mine = a.shares.directory
        taker = OwnDirectory(os.open(f"/proc/self/fd/{mine.fileno()}", os.O_RDWR))
        (number,) = (number for number, entry in mine.entries() if [*entry.tokens] == PROMPT[7 * BLOCK : 8 * BLOCK])
        assert taker.remove(number)
        slot, cached = b.compute([*PROMPT, 1])
        assert cached == 7 * BLOCK
        assert b.says(slot, PROMPT)
        assert len(taker.pinned()) == 7
        b.kv.check()
        taker.close()


@pytest.mark.parametrize("options", [{}, {"layout": "fused", "num_layers": 2}, {"v_head_dim": 128}])
def test_parts_of_a_run_are_used_and_given_back_apart(broker: brokers.Process, options: dict[str, Any]) -> None:
    """Also where keys and values are of two kinds, of which a block has other numbers of pages."""
    with engines("a", "b", **options) as (a, b):
        a.kv.free_reqid(a.publish(PROMPT))
        wait_until(lambda: not a.pool.publishing)
        b.meets()
        blocks = len(PROMPT) // a.kv.prefix_block_tokens
        slot, cached = b.compute([*PROMPT, 1])
        pages = b.shares.foreign_pages
        short, again = b.compute([*PROMPT[: 12 * BLOCK], 1])
        assert (cached, again) == (len(PROMPT), 12 * BLOCK)
        assert b.shares.foreign_pages == pages
        b.kv.check()
        b.kv.free_reqid(slot)
        wait_until(lambda: b.shares.foreign_pages == pages * 12 // 20)
        wait_until(lambda: len(a.shares.directory.pinned()) == blocks * 12 // 20)
        assert b.says(short, PROMPT[: 12 * BLOCK])
        b.kv.check()
        slot, cached = b.compute([*PROMPT, 2])  # what it has, and what it has given back
        assert cached == len(PROMPT)
        assert b.says(slot, PROMPT)
        assert b.shares.foreign_pages == pages
        assert len(a.shares.directory.pinned()) == blocks
        b.kv.check()


def test_what_an_interrupted_admission_has_fetched_is_given_back(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines("a", "b") as (a, b):
        a.publish(PROMPT)
        b.meets()
        fetch = Shares.fetch

        def interrupted(self: Shares, *what: Any) -> Any:
            fetch(self, *what)
            raise KeyboardInterrupt

        monkeypatch.setattr(Shares, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            b.kv.admit([*PROMPT, 1])
        monkeypatch.undo()
        wait_until(lambda: not a.shares.directory.pinned())
        assert b.shares.foreign_pages == 0
        assert b.compute([*PROMPT, 1])[1] == len(PROMPT)
        b.kv.check()


def test_its_owner_keeps_what_others_have_mapped_and_gets_back_what_nobody_has(broker: brokers.Process) -> None:
    with engines("a", "b") as (a, b):
        a.kv.free_reqid(a.publish(PROMPT))
        b.meets()
        slot, _ = b.compute([*PROMPT[: 10 * BLOCK], 1])
        big = a.kv.alloc_reqid()
        with pytest.raises(vattn.OutOfPages):
            a.kv.step({big: (PAGES - 20) // 2 * BLOCK})
        assert b.says(slot, PROMPT[: 10 * BLOCK])
        a.kv.check()
        b.kv.check()
        wait_until(lambda: sum(1 for _ in a.shares.directory.entries()) == 20)  # also those that nobody had
        b.kv.free_reqid(slot)
        wait_until(lambda: not b.shares.foreign_pages)
        b.kv.trim()
        a.kv.step({big: (PAGES - 20) // 2 * BLOCK})
        a.kv.check()
        assert broker.problems() == []


@pytest.mark.parametrize("mapped", [0, 10])
@pytest.mark.parametrize("how", ["step", "evict_prefixes"])
def test_what_a_call_that_fails_would_have_evicted_is_found_again(
    broker: brokers.Process, monkeypatch: pytest.MonkeyPatch, mapped: int, how: str
) -> None:
    """Whether others have it mapped, so that it is hidden, or not."""
    with engines("a", "b", "c") as (a, b, c):
        a.kv.free_reqid(a.publish(PROMPT))
        b.meets(2)
        c.meets(2)
        first, _ = c.compute([*PROMPT[: mapped * BLOCK], 1])
        before = a.shares.directory.read(0)
        if how == "step":
            slot = a.kv.alloc_reqid()
            with pytest.raises(vattn.OutOfPages):
                a.kv.step({slot: PAGES * BLOCK})
        else:
            evict = SharedBlocks.evict

            def fails(self: SharedBlocks, change: Change, block: PageBlock) -> None:
                evict(self, change, block)
                if not len(self.index):
                    raise vattn.VattnError("no")

            monkeypatch.setattr(SharedBlocks, "evict", fails)
            with pytest.raises(vattn.VattnError):
                a.kv.evict_prefixes()
            monkeypatch.undo()
        assert a.kv.find_prefix([*PROMPT, 1]) == len(PROMPT)
        wait_until(lambda: not a.pool.publishing)
        slot, cached = b.compute([*PROMPT, 2])
        assert cached == len(PROMPT)
        assert b.says(slot, PROMPT)
        assert c.says(first, PROMPT[: mapped * BLOCK])
        entry = a.shares.directory.read(0)
        assert (entry == before) == (mapped > 0)  # published anew unless it was there all the time
        for each in (a, b, c):
            each.kv.check()
        assert broker.problems() == []
        a.kv.evict_prefixes()
        assert not a.shares.hidden_keys.isdisjoint(block_keys(root_key(b""), PROMPT, BLOCK))
        a.kv.check()


def test_what_others_have_mapped_takes_no_memory_from_the_owners_slots(broker: brokers.Process) -> None:
    with Engine("owner", max_batch_size=1, max_context_len=len(PROMPT)) as owner, Engine("reader") as reader:
        slot = owner.publish(PROMPT)
        reader.meets()
        assert reader.compute([*PROMPT, 1])[1] == len(PROMPT)
        owner.kv.free_reqid(slot)
        wait_until(lambda: owner.kv._ledger.pinned == 40)
        slot = owner.kv.alloc_reqid()
        wait_until(lambda: owner.kv.borrow_pages(40) >= 0 and owner.kv.available_pages() >= 40)
        owner.kv.step({slot: len(PROMPT)})
        assert owner.kv.stats().mapped_pages == 80
        owner.kv.check()
        reader.kv.check()


def test_what_others_have_mapped_counts_in_a_budget_that_was_given(broker: brokers.Process) -> None:
    with Engine("owner", memory_budget=60 * PAGE) as owner, Engine("other") as reader:
        slot = owner.publish(PROMPT)
        reader.meets()
        assert reader.compute([*PROMPT, 1])[1] == len(PROMPT)
        owner.kv.free_reqid(slot)
        wait_until(lambda: owner.kv._ledger.pinned == 40)
        wait_until(lambda: not owner.kv.borrow_pages(40) and owner.kv.available_pages() == 20)
        slot = owner.kv.alloc_reqid()
        with pytest.raises(vattn.OutOfPages) as refused:
            owner.kv.step({slot: len(PROMPT)})
        assert refused.value.may_pass
        owner.kv.check()


@pytest.mark.parametrize("how", ["admitted", "evicted", "not shared any more"])
def test_what_others_have_mapped_is_subtracted_only_while_it_is_cached(broker: brokers.Process, how: str) -> None:
    """At once: what a request uses counts in what it needs, and what has gone is not held."""
    with engines("a", "b") as (a, b):
        slot = a.publish(PROMPT)
        b.meets()
        b.compute([*PROMPT, 1])
        assert a.kv._ledger.pinned == 0
        a.kv.free_reqid(slot)
        wait_until(lambda: a.kv._ledger.pinned == 40)
        with a.pool._core.lock:  # nothing is looked after meanwhile
            before = a.kv.available_pages()
            if how == "admitted":
                slot, cached = a.kv.admit([*PROMPT, 2])
                assert cached == len(PROMPT)
                assert a.kv.available_pages() >= before
                a.kv.free_reqid(slot)
                assert a.kv._ledger.pinned == 40
            elif how == "not shared any more":
                a.kv.stop_sharing()
                assert a.kv._ledger.pinned == 40
            else:
                a.kv.evict_prefixes()
                assert a.kv._ledger.pinned == 0
                assert a.kv.available_pages() >= before
            a.kv.check()


def test_what_others_have_mapped_is_subtracted_once_where_it_is_left_over(broker: brokers.Process) -> None:
    with engines("a", "b") as (a, b):
        slot = a.publish(PROMPT)
        b.meets()
        b.compute([*PROMPT, 1])
        a.kv.step({slot: 0})
        wait_until(lambda: a.kv._ledger.pinned == 40)
        assert a.kv._reclaimer.spare_pages == 0
        a.kv.check()


def test_what_is_retracted_is_found_no_more_and_not_used_again_while_mapped(broker: brokers.Process) -> None:
    with engines("a", "b") as (a, b):
        wrong = a.publish(PROMPT, value=9.0)
        b.meets()
        assert b.kv.take_withdrawn() == set()
        slot, cached = b.compute([*PROMPT, 1])
        assert cached == len(PROMPT)
        a.kv.retract(wrong)
        assert b.kv.take_withdrawn() == set(block_keys(root_key(b""), PROMPT, b.kv.prefix_block_tokens))
        assert b.kv.take_withdrawn() == set()
        a.kv.free_reqid(wrong)
        a.kv.trim()
        a.kv.check()
        assert b.says(slot, PROMPT, 9.0)  # what it had is nothing else now
        assert b.kv.find_prefix([*PROMPT, 2]) in (0, len(PROMPT))
        again, cached = b.compute([*PROMPT, 2])
        assert cached == 0
        assert b.says(again, PROMPT)
        assert len(a.shares.held) == 20
        b.kv.check()
        b.kv.free_reqid(slot)
        wait_until(lambda: not a.shares.held)
        a.kv.check()


def test_what_is_evicted_stays_right_for_those_who_have_it_mapped(broker: brokers.Process) -> None:
    """They keep what they computed on it, and nobody else finds it."""
    with engines("a", "b", "c") as (a, b, c):
        a.kv.free_reqid(a.publish(PROMPT))
        b.meets(2)
        c.meets(2)
        assert b.kv.take_withdrawn() == set()
        slot, cached = b.compute([*PROMPT, *range(BLOCK)])
        assert cached == len(PROMPT)
        a.kv.evict_prefixes()
        a.kv.check()
        assert b.kv.take_withdrawn() == set()
        assert b.kv.find_prefix([*PROMPT, *range(BLOCK), 1]) == len(PROMPT) + BLOCK
        assert c.compute([*PROMPT, 2])[1] == 0
        assert len(a.shares.held) == 20
        again = a.publish(PROMPT)
        a.kv.trim()
        assert a.says(again, PROMPT)
        assert b.says(slot, PROMPT)
        a.kv.check()
        b.kv.check()
        assert broker.problems() == []
        b.kv.free_reqid(slot)
        wait_until(lambda: not a.shares.held)
        a.kv.check()


@pytest.mark.parametrize("how", ["retract", "retract_tokens", "stop_sharing"])
def test_what_is_found_to_be_wrong_after_it_was_evicted_is_withdrawn(broker: brokers.Process, how: str) -> None:
    more = [*PROMPT, *range(BLOCK)]
    with engines("a", "b") as (a, b):
        first = a.publish(PROMPT, value=9.0)
        a.kv.free_reqid(a.publish(more, value=9.0))
        b.meets()
        b.kv.take_withdrawn()
        slot, cached = b.compute([*more, 1])
        assert cached == len(more)
        if how != "retract":
            a.kv.free_reqid(first)
        a.kv.evict_prefixes()
        assert b.kv.take_withdrawn() == set()
        {
            "retract": lambda: a.kv.retract(first),
            "retract_tokens": lambda: a.kv.retract_tokens(PROMPT),
            "stop_sharing": a.kv.stop_sharing,
        }[how]()
        a.kv.check()
        assert b.kv.take_withdrawn() == set(block_keys(root_key(b""), more, BLOCK))
        assert b.compute([*more, 2])[1] == 0
        assert b.says(slot, more, 9.0)
        b.kv.check()


def test_a_cache_that_stops_sharing_is_found_no_more(broker: brokers.Process) -> None:
    with engines("a", "b") as (a, b):
        a.publish(PROMPT)
        b.meets()
        slot, _ = b.compute([*PROMPT, 1])
        a.kv.stop_sharing()
        a.kv.check()
        assert b.compute([*PROMPT, 2])[1] == 0
        assert b.says(slot, PROMPT)
        assert a.compute([*PROMPT, 3])[1] == len(PROMPT)
        assert a.kv.evict_prefixes() == 0
        b.kv.check()


@pytest.mark.parametrize("who", ["owner", "reader"])
def test_what_is_withdrawn_leaves_the_slots_of_those_who_zero(broker: brokers.Process, who: str) -> None:
    """Also idle slots: the next request in one has nothing of it."""
    with engines("a", "b", zero_on_free=True) as (a, b):
        a.publish(PROMPT)
        b.meets()
        slot, cached = b.compute([*PROMPT, 1])
        assert cached == len(PROMPT)
        b.kv.free_reqid(slot)
        withdraw = {"owner": a, "reader": b}[who]
        withdraw.kv.stop_sharing()
        wait_until(lambda: b.kv.find_prefix([*PROMPT, 2]) == 0)
        b.kv.check()
        slot = b.kv.alloc_reqid()
        b.kv.step({slot: 64})
        assert not b.kv.layer(0)[0][slot, :64].any()
        b.kv.check()


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_what_was_published_outlives_its_process(broker: brokers.Process, how: str) -> None:
    """It counts once, and goes when memory is needed and nobody has it mapped."""
    with ExitStack() as stack:
        b = stack.enter_context(Engine("b"))
        if how == "killed":
            process = stack.enter_context(publisher())
            b.meets()
            slot, _ = b.compute([*PROMPT, 1])
            kill(process)
        else:
            with Engine("a") as a:
                a.kv.free_reqid(a.publish(PROMPT))
                b.meets()
                slot, _ = b.compute([*PROMPT, 1])
        wait_until(lambda: [each["name"] for each in broker.ask("top")["borrowers"]] == ["b"])
        wait_until(lambda: broker.ask("top")["kept"] == 40 * PAGE)
        assert b.says(slot, PROMPT)
        restarted = stack.enter_context(Engine("restarted"))
        restarted.meets(2)
        found, cached = restarted.compute([*PROMPT, 2])
        assert cached == len(PROMPT)
        assert restarted.says(found, PROMPT)
        assert broker.problems() == []
        broker.ask("reclaim", name=None, stage="cached")
        assert broker.ask("top")["kept"] == 40 * PAGE
        for engine, each in ((b, slot), (restarted, found)):
            engine.kv.check()
            engine.kv.free_reqid(each)
            wait_until(lambda engine=engine: not engine.shares.foreign_pages)
        big = restarted.kv.alloc_reqid()
        restarted.kv.step({big: (PAGES - 20) // 2 * BLOCK})
        assert broker.ask("top")["kept"] < 40 * PAGE
        assert broker.problems() == []


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_what_a_cache_published_is_memory_that_its_pool_gets_back(broker: brokers.Process, how: str) -> None:
    """Until it is needed others find it, and what they have mapped stays as it is."""
    with engines("a", "b") as (a, b):
        a.kv.free_reqid(a.publish(PROMPT))
        b.meets()
        if how == "closed":
            a.kv.close()
        a.kv = vattn.KVCache(a.config, pool=a.pool)
        slot, cached = b.compute([*PROMPT[: 10 * BLOCK], 1])
        assert cached == 10 * BLOCK
        wait_until(lambda: (broker.borrower("a") or {})["cached"] == 40 * PAGE)
        big = a.kv.alloc_reqid()
        with pytest.raises(vattn.OutOfPages):
            a.kv.step({big: (PAGES - 20) // 2 * BLOCK})
        assert b.says(slot, PROMPT[: 10 * BLOCK])
        a.kv.check()
        assert sum(1 for _ in a.shares.directory.entries()) == 10
        b.kv.free_reqid(slot)
        wait_until(lambda: not b.shares.foreign_pages)
        b.kv.trim()
        a.kv.step({big: (PAGES - 20) // 2 * BLOCK})
        a.kv.check()
        assert a.kv.stats().mapped_pages == PAGES - 20
        assert broker.problems() == []


def test_what_a_cache_published_is_given_back_to_the_broker(broker: brokers.Process) -> None:
    with Engine("a") as a:
        a.kv.free_reqid(a.publish(PROMPT))
        a.kv.close()
        assert isinstance(a.pool._core, LentCore)
        usage = a.pool._core.usage(wait=True)
        assert (usage.owned, usage.parked, usage.cached) == (0, 0, 40 * PAGE)
        assert usage.oldest is not None
        broker.ask("reclaim", name="a", stage="parked")
        assert a.pool._core.taken_pages == 40
        broker.ask("reclaim", name="a", stage="cached")
        wait_until(lambda: not a.shares.held)
        assert a.pool._core.taken_pages == 0
        assert broker.problems() == []


def test_a_reclaim_that_fails_gives_up_nothing_twice(broker: brokers.Process) -> None:
    with Engine("a") as a:
        a.kv.free_reqid(a.publish(PROMPT))
        a.kv.close()
        core = a.pool._core
        freed = []

        def fails(change: Change) -> None:
            freed.append(core.reclaim(change, 10, wait=False))
            raise vattn.VattnError

        with pytest.raises(vattn.VattnError):
            core.execute(fails)
        assert core.taken_pages == 40
        assert len(a.shares.held) == 20  # one a block
        core.execute(lambda change: freed.append(core.reclaim(change, 20, wait=False)))
        assert freed == [10, 20]
        assert core.taken_pages == 20
        assert len(a.shares.held) == 10
        core.native.check()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_cache_that_is_gone_has_nothing_of_others(broker: brokers.Process, how: str) -> None:
    with engines("a", "b") as (a, b):
        a.publish(PROMPT)
        b.meets()
        b.compute([*PROMPT, 1])
        assert len(a.shares.directory.pinned()) == 20
        if how == "closed":
            b.kv.close()
        else:
            del b.kv
        wait_until(lambda: not a.shares.directory.pinned())
        assert b.shares.foreign_pages == 0
        b.kv = vattn.KVCache(b.config, pool=b.pool)
        assert b.compute([*PROMPT, 1])[1] == 0
        b.kv.check()


def test_a_pool_whose_cache_is_gone_keeps_nothing_of_those_it_meets(broker: brokers.Process) -> None:
    with Engine("b") as b:
        b.kv.close()
        before = _memories()
        for _ in range(3):
            with Engine("a") as a:
                a.meets()
                b.meets()
            wait_until(lambda: not b.shares.peers)
        assert isinstance(b.pool._core, LentCore)
        assert not b.pool._core._met
        assert _memories() == before


def test_a_pool_that_left_nothing_is_forgotten_while_its_process_lives(broker: brokers.Process) -> None:
    with Engine("b") as b:
        with Engine("a") as a:
            a.kv.free_reqid(a.publish(PROMPT))
            b.meets()
        wait_until(lambda: broker.ask("top")["kept"] == 40 * PAGE)
        broker.ask("reclaim", name=None, stage="cached")
        wait_until(lambda: not b.shares.peers)
        assert broker.problems() == []


def test_readers_keep_what_they_have_when_broker_and_owner_are_killed(broker: brokers.Process) -> None:
    """The next broker counts what they still have, and others find it."""
    with Engine("b") as b, publisher() as process:
        b.meets()
        slot, _ = b.compute([*PROMPT, 1])
        broker.kill()
        kill(process)
        assert b.says(slot, PROMPT)
        broker.start()
        wait_until(lambda: broker.borrower("b") and broker.ask("top")["kept"] == 40 * PAGE)
        with Engine("c") as c:
            c.meets(2)
            found, cached = c.compute([*PROMPT, 2])
            assert cached == len(PROMPT)
            assert c.says(found, PROMPT)
        assert broker.problems() == []
        b.kv.check()


def test_what_a_process_leaves_that_has_joined_no_next_broker_is_counted(broker: brokers.Process) -> None:
    """It lived when those who know it joined, and counts once it has ended."""
    with Engine("b") as b, publisher() as process:
        b.meets()
        slot, _ = b.compute([*PROMPT, 1])
        process.send_signal(signal.SIGSTOP)
        assert isinstance(b.pool._core, LentCore)
        borrower, before = b.pool._core.borrower, b.pool._core.borrower._socket
        broker.kill()
        broker.start()
        wait_until(lambda: borrower._socket not in (None, before) and borrower._shares_told)
        assert broker.ask("top")["kept"] == 0
        kill(process)
        wait_until(lambda: broker.ask("top")["kept"] == 40 * PAGE)
        assert b.says(slot, PROMPT)
        assert broker.problems() == []
        b.kv.free_reqid(slot)
        wait_until(lambda: not b.shares.foreign_pages)
        broker.ask("reclaim", name=None, stage="cached")
        assert broker.ask("top")["kept"] == 0
        wait_until(lambda: not b.shares.peers)
        assert broker.problems() == []


def test_a_broker_that_is_killed_takes_nothing_from_those_who_know_each_other(broker: brokers.Process) -> None:
    with engines("a", "b") as (a, b):
        a.publish(PROMPT)
        b.meets()
        broker.kill()
        slot, cached = b.compute([*PROMPT, 1])
        assert cached == len(PROMPT)
        broker.start()
        wait_until(lambda: broker.borrower("b") and broker.borrower("a"))
        with Engine("c") as c:
            c.meets(2)
            assert c.compute([*PROMPT, 2])[1] == len(PROMPT)
        assert b.says(slot, PROMPT)
        assert broker.ask("top")["kept"] == 0
        assert broker.problems() == []
        b.meets(2)  # a, as before, and c


def test_a_reader_that_is_killed_gives_back_what_it_had(broker: brokers.Process) -> None:
    with Engine("a", overlap=False) as a:  # pages mapped ahead could be freed
        a.kv.free_reqid(a.publish(PROMPT))
        reader = scripts.start(_PUBLISHER.replace("publish(PROMPT)", "meets(); engine.compute([*PROMPT, 1])"))
        assert reader.stderr is not None
        assert reader.stderr.readline() == "ready\n", reader.stderr.read()
        assert len(a.shares.directory.pinned()) == 20
        assert a.kv.evict_prefixes() == 0
        a.kv.check()
        kill(reader)
        reader.stderr.close()
        wait_until(lambda: not a.shares.held)
        a.kv.check()


def test_models_with_windows_do_not_share(broker: brokers.Process) -> None:
    with pytest.raises(vattn.ConfigError, match="sliding windows are not shared"):
        Engine("a", sliding_window=64)


@pytest.mark.parametrize("given", [b"short", "f" * 32, 5])
def test_a_fingerprint_is_32_bytes(broker: brokers.Process, given: Any) -> None:
    with pytest.raises(vattn.ConfigError, match="give 32 bytes"):
        vattn.PagePool.connect(brokers.NAME, page_size=PAGE, fingerprint=given)


_USER = f"""
import random, sys, time
sys.path.append({str(Path(__file__).parents[3])!r})
import vattn
from tests.vattn.pool.test_shares import BLOCK, Engine
rng = random.Random(int(sys.argv[2]))
engine = Engine(sys.argv[1])
slots = {{}}
print("ready", file=sys.stderr, flush=True)
for turn in range(10**9):
    try:
        if len(slots) < 4 and rng.random() < 0.5:
            start, length = rng.randrange(1, 4), rng.randrange(1, 12 * BLOCK)
            prompt = [start + 7 * i for i in range(length)]
            slot, _ = engine.compute(prompt)
            slots[slot] = prompt
        elif slots and rng.random() < 0.5:
            slot = rng.choice([*slots])
            engine.kv.free_reqid(slot)
            del slots[slot]
        elif rng.random() < 0.1:
            engine.kv.evict_prefixes()
        elif slots and rng.random() < 0.05:
            engine.kv.retract(rng.choice([*slots]))
        elif rng.random() < 0.1:
            engine.kv.check()
        time.sleep(rng.random() / 100)
    except vattn.OutOfPages:
        while slots:
            engine.kv.free_reqid(slots.popitem()[0])
    for slot, prompt in slots.items():
        assert engine.says(slot, prompt), (turn, slot, len(prompt))
"""


@pytest.mark.slow
def test_processes_that_are_killed_at_random_serve_nothing_wrong(broker: brokers.Process) -> None:
    """They compute, retract and evict prompts that begin alike; they and the broker are killed at any instant."""
    rng = random.Random(2027)
    running: dict[str, scripts.Process] = {}

    def start(name: str) -> None:
        running[name] = scripts.start(_USER, name, str(rng.randrange(10**6)))
        error = running[name].stderr
        assert error is not None
        assert error.readline() == "ready\n", error.read()

    def stop(name: str) -> None:
        kill(running[name])
        error = running[name].stderr
        assert error is not None
        error.close()

    try:
        for name in "abc":
            start(name)
        for _ in range(effort(8, 1000)):
            time.sleep(rng.random() * 0.5)
            for other, process in running.items():
                if not os.path.exists(f"/proc/{process.pid}/exe"):
                    assert process.stderr is not None
                    pytest.fail(f"{other}: {process.stderr.read()}")
            event, name = rng.random(), rng.choice("abc")
            if event < 0.6:
                stop(name)
                start(name)
            elif event < 0.8:
                broker.kill()
                time.sleep(rng.random() * 0.2)
                broker.start()
            else:
                broker.ask("reclaim", name=None, stage="cached")
            wait_until(lambda: broker.problems() == [], broker.problems)
    finally:
        for name in running:
            stop(name)


def test_nothing_stays_open(broker: brokers.Process) -> None:
    before = _memories()
    for turn in range(3):
        with engines("a", "b") as (a, b):
            a.publish([turn, *PROMPT[1:]])
            b.meets()
            assert b.compute([turn, *PROMPT[1:], 1])[1] == len(PROMPT)
    assert _memories() == before


def test_a_pool_that_is_dropped_keeps_nothing_open(broker: brokers.Process) -> None:
    """Nor does it have anything pinned; what it has published stays in the broker's pool."""
    before = _memories()
    with publisher():
        for turn in range(3):
            a = Engine("a")
            a.meets()
            slot, cached = a.compute([*PROMPT, *range(turn, turn + 2 * BLOCK)])
            assert cached == len(PROMPT)
            wait_until(lambda a=a: sum(1 for _ in a.shares.directory.entries()) == 2)
            if turn:
                a.kv.free_reqid(slot)
                a.kv.close()
            del a
            gc.collect()
            wait_until(lambda: _memories() <= before)
            wait_until(lambda turn=turn: broker.ask("top")["kept"] == (turn + 1) * 4 * PAGE)
        assert broker.problems() == []


def _memories() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor
            count += "/memfd:vattn" in os.readlink(f"/proc/self/fd/{name}")
    return count
