"""Random requests that share prefixes, with driver calls failing at random, against a model that knows no blocks.

What is written into a token depends on all tokens before it and on the salt, as K and V do: a block that is shared
where it should not be shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis.stateful import invariant, rule

import vattn
from tests.support.machines import SLOTS, Machine, examples, makes_cache

CONTEXT = 72
BUDGET_PAGES = 80

# Few different prompts, so that prefixes meet; and what follows them differs early.
prompts = st.builds(
    lambda period, tail, length: [(i // period) % 2 for i in range(length)][: length - len(tail)] + tail,
    st.sampled_from([100, 9]),
    st.lists(st.integers(0, 2), max_size=3),
    st.sampled_from([CONTEXT - 20, CONTEXT, 5, 18]),
)

# What is drawn never depends on how an operation ended: that may depend on how far the worker is, and hypothesis has to
# draw the same again when it repeats an example. So a rule draws first, and then does what is possible.
requests = st.integers(0, SLOTS - 1)
failures = st.one_of(st.none(), st.none(), st.tuples(st.integers(1, 40), st.sampled_from([2, 999])))
amounts = st.integers(0, CONTEXT)
continuations = st.lists(st.integers(0, 2), min_size=1, max_size=4)

Failure = tuple[int, int] | None


def values(ids: list[int], salt: bytes) -> torch.Tensor:
    """One number per token, of all tokens up to it and the salt; exact in float32."""
    state, found = zlib.crc32(salt), []
    for token in ids:
        state = zlib.crc32(bytes([token]), state)
        found.append(state % 1_000_003)
    return torch.tensor(found, dtype=torch.float32)


class SharingMachine(Machine):
    """The model: per running slot its tokens, of which some are computed, and its salt."""

    @makes_cache(
        v_head_dim=st.sampled_from([64, 64, 32, 48]),
        windows=st.sampled_from([(None, None), (None, 10), (20, 20), (1, 30)]),
    )
    def make(self, overlap: bool, **options: Any) -> None:
        self.make_cache(CONTEXT, BUDGET_PAGES, overlap=overlap, **options)
        self.overlap = overlap
        self.ids: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.started: dict[int, int] = {}  # from where on the last step computed
        self.salts: dict[int, bytes] = {}

    def chosen(self, number: int) -> int:
        """One of the running requests."""
        return sorted(self.ids)[number % len(self.ids)]

    def attempt(self, failure: Failure, call: Callable[[], Any]) -> Any:
        """What the call returns; None if it failed, and then nothing changed."""
        before = self.books()
        self.table.heal()
        if failure is not None:
            # Which call is the n-th must not depend on how far the worker is.
            self.cache._core.mapper.wait(self.cache._core.mapper.last)
            self.cache._core.mapper.unstock()
            self.table.fail(*failure)
        try:
            return call()
        except (vattn.OutOfPages, vattn.DriverError) as error:
            assert isinstance(error, vattn.OutOfPages) or self.table.failed is not None
            self.table.heal()
            assert self.books() == before
            return None

    def books(self) -> Any:
        """What may not change where an operation fails. In the background pages come and go."""
        lengths = {p.reqid: p.length for p in self.cache.page_map() if p.active}
        stats = self.cache.stats()
        queried = stats.query_tokens, stats.hit_tokens, stats.shared_pages
        return (lengths, queried) if self.overlap else (lengths, queried, stats.owned_pages)

    @rule(prompt=prompts, salt=st.sampled_from([b"", b"other"]), failure=failures, steps=st.lists(failures, max_size=1))
    def admit(self, prompt: list[int], salt: bytes, failure: Failure, steps: list[Failure]) -> None:
        if len(self.ids) == SLOTS:
            return
        admission = self.attempt(failure, lambda: self.cache.admit(prompt, salt))
        if admission is None:
            return
        reqid, cached = admission
        assert reqid not in self.ids
        assert 0 <= cached < len(prompt)
        self.ids[reqid], self.computed[reqid], self.salts[reqid] = list(prompt), cached, salt
        self.started[reqid] = cached
        for each in steps:  # as it is done
            self.advance({reqid: len(prompt)}, each, [0])
            self.cache.commit(reqid, self.ids[reqid][: self.computed[reqid]])

    @rule(
        moves=st.dictionaries(requests, st.tuples(st.integers(0, 9), amounts), min_size=1),
        failure=failures,
        continuation=continuations,
    )
    def compute(self, moves: dict[int, tuple[int, int]], failure: Failure, continuation: list[int]) -> None:
        """A step for any number of requests: some go on, some step back and will go on with other tokens."""
        aims = {}
        for number, (back, amount) in moves.items() if self.ids else ():
            reqid = self.chosen(number)
            low, high = (0, self.computed[reqid]) if back == 0 else (self.computed[reqid], CONTEXT)
            aims[reqid] = low + amount % (high - low + 1)
        before = self.books()
        try:
            self.advance(aims, failure, continuation)
        except vattn.InvalidLength:
            assert self.books() == before
            assert any(n < self.started[r] for r, n in aims.items()), "cannot take back what was computed last"
            assert any(self.windows)

    def advance(self, lengths: dict[int, int], failure: Failure, continuation: Sequence[int]) -> None:
        needed = sum(self.cache.pages_needed(n, r) for r, n in lengths.items())
        available = self.cache.available_pages()

        def call() -> bool:
            try:
                self.cache.step(lengths)
            except vattn.OutOfPages:
                assert needed > available or self.table.failed is not None, "refused what it had promised"
                raise
            return True

        if not self.attempt(failure, call):
            return
        self.started = {r: min(n, lengths.get(r, n)) for r, n in self.computed.items()}
        for reqid, length in lengths.items():
            ids, start = self.ids[reqid], self.computed[reqid]
            if length < start:
                self.ids[reqid] = ids[:length]
            else:
                self.assert_seen(reqid, start)
                while len(ids) < length:
                    ids.append(continuation[len(ids) % len(continuation)])
                self.write(reqid, start, values(ids[:length], self.salts[reqid])[start:])
            self.computed[reqid] = length

    @rule(number=requests)
    def commit(self, number: int) -> None:
        if self.ids:
            reqid = self.chosen(number)
            self.cache.commit(reqid, self.ids[reqid][: self.computed[reqid]])

    @rule(number=requests, failure=failures)
    def fork(self, number: int, failure: Failure) -> None:
        if not 0 < len(self.ids) < SLOTS:
            return
        source = self.chosen(number)
        reqid = self.attempt(failure, lambda: self.cache.fork(source))
        if reqid is not None:
            assert reqid not in self.ids
            self.ids[reqid] = self.ids[source].copy()
            self.computed[reqid], self.salts[reqid] = self.computed[source], self.salts[source]
            self.started[reqid] = self.started[source]

    @rule(number=requests, failure=failures)
    def unshare(self, number: int, failure: Failure) -> None:
        """Then all of its tokens can be written, and nobody else sees it."""
        if not self.ids:
            return
        reqid = self.chosen(number)
        if self.attempt(failure, lambda: self.cache.unshare(reqid) or True) is None:
            return
        length = self.computed[reqid]
        assert self.cache._bands.stop(reqid) == 0
        self.assert_seen(reqid, length)
        rows = [
            tensor[reqid, 0 if window is None else max(0, length - window + 1) : length]
            for layer, window in enumerate(self.windows)
            for tensor in self.cache.layer(layer)
        ]
        kept = [each.clone() for each in rows]
        for each in rows:
            each.fill_(-1)
        for other in self.computed.keys() - {reqid}:
            self.assert_seen(other, self.computed[other])
        for each, before in zip(rows, kept, strict=True):
            each.copy_(before)

    @rule(number=requests)
    def free(self, number: int) -> None:
        if self.ids:
            reqid = self.chosen(number)
            self.cache.free_reqid(reqid)
            del self.ids[reqid], self.computed[reqid], self.salts[reqid], self.started[reqid]

    @rule(trim=st.booleans(), evict=st.integers(0, 5), failure=failures)
    def give_back(self, trim: bool, evict: int, failure: Failure) -> None:
        if evict == 0:
            freed = self.attempt(failure, self.cache.evict_prefixes)
            assert freed is None or self.cache.stats().cached_pages == 0
        if trim:
            self.attempt(failure, self.cache.trim)

    @invariant()
    def books_and_mappings_agree_and_every_token_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.table.heal()
        with self.table.transparent():
            self.cache.check()
        stats = self.cache.stats()
        held = stats.owned_pages + stats.parked_pages + stats.cached_pages
        assert held + stats.free_pages == BUDGET_PAGES
        assert stats.shared_pages <= stats.owned_pages
        assert stats.live_tokens == sum(self.computed.values())
        for reqid, length in self.computed.items():
            self.assert_seen(reqid, length)

    def assert_seen(self, reqid: int, start: int) -> None:
        """What queries from token `start` on see is there."""
        expected = values(self.ids[reqid][:start], self.salts[reqid])[:, None, None]
        for layer, window in enumerate(self.windows):
            first = 0 if window is None else max(0, start - window + 1)
            for side, tensor in enumerate(self.cache.layer(layer)):
                found = tensor[reqid, first:start]
                assert torch.equal(found, (expected[first:] * 4 + layer * 2 + side).expand_as(found))

    def write(self, reqid: int, start: int, numbers: torch.Tensor) -> None:
        # A write there would end the process, and with it the search for the shortest example.
        bands = self.cache._bands
        assert not len(numbers) or bands.stop(reqid) * bands.block_tokens <= start, "not the request's own"
        for layer in range(2):
            for side, tensor in enumerate(self.cache.layer(layer)):
                rows = tensor[reqid, start : start + len(numbers)]
                rows.copy_((numbers[:, None, None] * 4 + layer * 2 + side).expand_as(rows))


TestSharing = SharingMachine.TestCase
TestSharing.settings = examples()
