"""What ended requests leave behind their last whole block, and who finds it."""

from __future__ import annotations

from typing import Any

import pytest

import vattn
from tests.support.target import host_only, memory_calls
from tests.vattn.slots.test_sharing import BLOCK, PAGE, PROMPT, holds, make, run

WHOLE = len(PROMPT) // BLOCK * BLOCK
MORE = [*PROMPT, *range(1000, 1100)]  # the next turn


def left(cache: vattn.KVCache, ids: list[int] = PROMPT, value: float = 1, salt: bytes = b"") -> int:
    """A request that was computed and has ended; its slot."""
    reqid = run(cache, ids, salt, value)
    cache.free_reqid(reqid, token_ids=ids)
    cache.check()
    return reqid


def test_the_next_turn_computes_only_what_is_new() -> None:
    with make() as cache:
        slot = left(cache)
        before = memory_calls(cache.stats())
        assert cache.admit(MORE) == (slot, len(PROMPT))
        assert memory_calls(cache.stats()) == before
        assert holds(cache, slot, 0, len(PROMPT), 1)
        cache.check()
        assert cache.stats().hit_tokens == len(PROMPT)
        # Its own rows follow, in the same page, and are published with those that it found.
        cache.step({slot: len(MORE)})
        cache.commit(slot, MORE)
        other, cached = cache.admit(MORE)
        assert cached == len(MORE) // BLOCK * BLOCK
        assert holds(cache, other, WHOLE, len(PROMPT), 1)
        cache.check()


@pytest.mark.parametrize("common", [1, 5, 8])
def test_what_goes_on_differently_finds_what_is_the_same(common: int) -> None:
    with make() as cache:
        slot = left(cache)
        other = [*PROMPT[: WHOLE + common], *range(2000, 2050)]
        assert cache.admit(other) == (slot, WHOLE + common)
        cache.check()


def test_it_can_be_counted_before() -> None:
    with make() as cache:
        assert cache.find_prefix(MORE, rows=True) == 0
        slot = left(cache)
        other = [*PROMPT[: WHOLE + 5], *range(2000, 2050)]
        assert [cache.find_prefix(ids) for ids in (MORE, other)] == [WHOLE, WHOLE]
        assert [cache.find_prefix(ids, rows=True) for ids in (MORE, other)] == [len(PROMPT), WHOLE + 5]
        assert cache.find_prefix(PROMPT, rows=True) == len(PROMPT) - 1
        assert cache.find_prefix(MORE, b"salt", rows=True) == 0
        assert cache.admit(MORE) == (slot, len(PROMPT))
        assert cache.find_prefix(MORE, rows=True) == WHOLE


def test_the_last_token_is_always_computed() -> None:
    with make() as cache:
        slot = left(cache)
        assert cache.admit(PROMPT) == (slot, len(PROMPT) - 1)
        cache.check()


def test_one_request_finds_it() -> None:
    with make() as cache:
        slot = left(cache)
        assert cache.admit(MORE) == (slot, len(PROMPT))
        assert cache.admit(MORE).cached_tokens == WHOLE
        cache.free_reqid(slot)  # and does not say what it held
        assert cache.admit(MORE).cached_tokens == WHOLE
        cache.check()


def test_it_is_found_without_a_block_before_it() -> None:
    with make() as cache:
        short = PROMPT[: BLOCK - 4]
        slot = left(cache, short)
        assert cache.admit([*short, 7, 8, 9]) == (slot, len(short))
        cache.check()


def test_of_several_the_longest_is_taken() -> None:
    with make() as cache:
        slots = [run(cache, [*PROMPT[:WHOLE], 9, *range(n)], value=n) for n in (3, 20, 10)]
        for slot, n in zip(slots, (3, 20, 10), strict=True):
            cache.free_reqid(slot, token_ids=[*PROMPT[:WHOLE], 9, *range(n)])
        slot, cached = cache.admit([*PROMPT[:WHOLE], 9, *range(100)])
        assert (slot, cached) == (slots[1], WHOLE + 21)
        assert holds(cache, slot, WHOLE, cached, 20)
        cache.check()


def test_salts_share_nothing() -> None:
    with make() as cache:
        left(cache, PROMPT[:20], salt=b"a")
        assert cache.admit(PROMPT[:40], b"b").cached_tokens == 0


def test_it_goes_with_its_pages() -> None:
    with make() as cache:
        left(cache)
        cache.trim()
        cache.check()
        assert cache.admit(MORE).cached_tokens == WHOLE


def test_it_goes_with_the_cached_blocks() -> None:
    with make() as cache:
        left(cache)
        left(cache, [5, 6, 7])
        cache.evict_prefixes()
        cache.check()
        assert cache.admit(MORE).cached_tokens == 0
        assert cache.admit([5, 6, 7, 8]).cached_tokens == 0


def test_parked_pages_go_before_it() -> None:
    """It costs a request that comes a page or two, and the one that goes on with it a whole block."""
    with make(memory_budget=48 * PAGE) as cache:
        slot = left(cache)
        parked = cache.alloc_reqid()
        cache.step({parked: 5 * BLOCK})
        cache.free_reqid(parked)
        other = cache.alloc_reqid()
        free = cache.available_pages() - cache.stats().cached_pages
        assert cache.pages_needed(5 * BLOCK) <= free
        cache.step({other: 5 * BLOCK})
        cache.check()
        assert cache.admit(MORE) == (slot, len(PROMPT))


@pytest.mark.parametrize("changes", [{"zero_on_free": True}, {"deferred_reclamation": False}], ids=str)
def test_it_is_not_kept_where_pages_do_not_stay(changes: dict[str, Any]) -> None:
    with make(**changes) as cache:
        left(cache)
        assert cache.admit(MORE).cached_tokens <= WHOLE
        cache.check()


@host_only
def test_it_is_not_kept_behind_a_window() -> None:
    groups = [
        vattn.TensorGroup(layers=[i], num_kv_heads=1, head_dim=16, sliding_window=w) for i, w in ((0, None), (1, 32))
    ]
    with vattn.KVCache(vattn.KVConfig(groups=groups, dtype="float32", max_batch_size=2, max_context_len=640)) as cache:
        reqid, _ = cache.admit(PROMPT)
        cache.step({reqid: len(PROMPT)})
        cache.free_reqid(reqid, token_ids=PROMPT)
        cache.check()
        assert cache.admit(MORE).cached_tokens % cache.prefix_block_tokens == 0


def test_what_was_taken_back_is_not_kept() -> None:
    with make() as cache:
        reqid = run(cache, PROMPT[:20])
        cache.retract(reqid)
        cache.free_reqid(reqid, token_ids=PROMPT[:20])
        assert cache.admit(PROMPT).cached_tokens == 0
        cache.check()


@pytest.mark.parametrize(("since", "found"), [(0, 0), (WHOLE, WHOLE), (WHOLE + 4, WHOLE), (len(PROMPT), len(PROMPT))])
def test_rows_of_retracted_tokens_are_forgotten(since: int, found: int) -> None:
    with make() as cache:
        left(cache)
        cache.retract_tokens(PROMPT, since=since)
        cache.check()
        assert cache.find_prefix(MORE, rows=True) == found


def test_rows_behind_retracted_blocks_are_forgotten() -> None:
    with make() as cache:
        first = run(cache, PROMPT[: WHOLE + 1])
        cache.commit(first, PROMPT[:WHOLE])
        second, cached = cache.admit(PROMPT)
        assert cached == WHOLE
        cache.step({second: len(PROMPT)})
        cache.free_reqid(second, token_ids=PROMPT)
        assert cache.find_prefix(MORE, rows=True) == len(PROMPT)
        cache.retract(first)
        cache.check()
        with pytest.raises(vattn.TokenMismatch):  # a call that is taken back derives the books anew
            cache.commit(first, PROMPT)
        cache.check()
        assert cache.find_prefix(MORE, rows=True) == 0


def test_an_idle_slot_is_found_by_a_block_that_was_committed_later() -> None:
    with make() as cache:
        first = cache.alloc_reqid()
        cache.step({first: WHOLE})
        fork = cache.fork(first)
        cache.free_reqid(fork)
        cache.check()
        cache.commit(first, PROMPT[:WHOLE])
        cache.check()
        before = memory_calls(cache.stats())
        assert cache.admit(PROMPT) == (fork, WHOLE)
        assert memory_calls(cache.stats()) == before


def test_tokens_behind_the_length_are_refused() -> None:
    with make() as cache:
        reqid = run(cache, PROMPT)
        cache.step({reqid: len(PROMPT) - 3})
        with pytest.raises(vattn.TokenMismatch, match="200 token ids for a request that holds 197 tokens"):
            cache.free_reqid(reqid, token_ids=PROMPT)
        with pytest.raises(vattn.InvalidTokens):
            cache.free_reqid(reqid, token_ids=["a"])  # type: ignore[list-item]
        with pytest.raises(vattn.ConfigError, match="neither a stream"):
            cache.free_reqid(reqid, PROMPT)  # type: ignore[arg-type]
        cache.check()
        cache.free_reqid(reqid, token_ids=PROMPT[:-3])  # the request is still there
        assert cache.admit(PROMPT).cached_tokens == len(PROMPT) - 3
        cache.check()
