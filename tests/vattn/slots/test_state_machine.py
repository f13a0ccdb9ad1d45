"""Random operations, with driver calls failing at random, against a model that knows nothing of pages."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis.stateful import invariant, precondition, rule

import vattn
from tests.support.machines import SLOTS, Machine, examples, makes_cache

CONTEXT = 40
BUDGET_PAGES = 40


class CacheMachine(Machine):
    """The model: per running slot, its length and the number written into each of its tokens."""

    @makes_cache(
        v_head_dim=st.sampled_from([64, 32]),
        windows=st.sampled_from([(None, None), (None, 6), (9, 9), (1, 14)]),
    )
    def make(self, **options: Any) -> None:
        self.make_cache(CONTEXT, BUDGET_PAGES, **options)
        self.tokens: dict[int, list[int]] = {}
        self.started: dict[int, int] = {}  # from where on the last step computed
        self.next_value = 1

    @rule(hint=st.one_of(st.none(), st.integers(1, CONTEXT)))
    def alloc(self, hint: int | None) -> None:
        if len(self.tokens) == SLOTS:
            try:
                self.cache.alloc_reqid(hint)
            except vattn.NoFreeSlot:
                return
            raise AssertionError("a slot too many")
        reqid = self.cache.alloc_reqid(hint)
        assert reqid not in self.tokens
        assert 0 <= reqid < SLOTS
        self.tokens[reqid] = []
        self.started[reqid] = 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        reqid = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.free_reqid(reqid, self.stream)
        del self.tokens[reqid]

    @precondition(lambda self: self.tokens)
    @rule(
        data=st.data(),
        fail_at=st.one_of(st.none(), st.integers(1, 60)),
        announce=st.booleans(),
        look_ahead=st.booleans(),
    )
    def step(self, data: st.DataObject, fail_at: int | None, announce: bool, look_ahead: bool) -> None:
        """Any lengths, up and down; the n-th driver call from here on may fail, in this step or in the background."""
        lengths = data.draw(st.dictionaries(st.sampled_from(sorted(self.tokens)), st.integers(0, CONTEXT), min_size=1))
        following = {r: min(CONTEXT, n + 7) for r, n in lengths.items()} if announce else None
        if fail_at is not None:
            self.table.fail(fail_at, data.draw(st.sampled_from([2, 999])))
        self.launch_prepared()
        before = self.books()
        try:
            self.cache.step(lengths, following, stream=self.stream, look_ahead=look_ahead)
        except vattn.InvalidLength:
            assert any(n < self.started[r] for r, n in lengths.items()), "cannot take back what was computed last"
            assert any(self.windows)
            assert self.books() == before
            return
        except (vattn.OutOfPages, vattn.DriverError) as error:
            if not isinstance(error, vattn.DriverError) and self.table.failed is None:
                assert self.pages(lengths) > BUDGET_PAGES
            assert self.books() == before
            return
        self.started = {r: min(len(tokens), lengths.get(r, len(tokens))) for r, tokens in self.tokens.items()}
        for reqid, length in lengths.items():
            tokens = self.tokens[reqid]
            del tokens[length:]
            self.assert_seen(reqid)
            for position in range(len(tokens), length):
                self.write(reqid, position, self.next_value)
                tokens.append(self.next_value)
                self.next_value += 1
        self.prepare(lengths)

    @rule()
    def look_ahead(self) -> None:
        self.cache.look_ahead(stream=self.stream)

    @rule()
    def trim(self) -> None:
        self.launch_prepared()
        self.cache.trim()

    @rule(wrong=st.sampled_from([-1, SLOTS, SLOTS + 7]))
    def misuse(self, wrong: int) -> None:
        for call in (lambda: self.cache.free_reqid(wrong), lambda: self.cache.step({wrong: 1})):
            try:
                call()
            except vattn.InvalidSlot:
                continue
            raise AssertionError("a slot that does not exist was accepted")

    @invariant()
    def books_and_mappings_agree_and_every_token_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.table.heal()
        self.cache.check()
        stats = self.cache.stats()
        assert stats.owned_pages + stats.parked_pages + stats.cached_pages + stats.free_pages == BUDGET_PAGES
        assert stats.live_tokens == sum(map(len, self.tokens.values()))
        for reqid in self.tokens:
            self.assert_seen(reqid)

    def assert_seen(self, reqid: int) -> None:
        """What the next queries see is there."""
        tokens = self.tokens[reqid]
        for layer, window in enumerate(self.windows):
            first = 0 if window is None else max(0, len(tokens) - window + 1)
            for side, tensor in enumerate(self.cache.layer(layer)):
                found = tensor[reqid, first : len(tokens)]
                expected = torch.tensor(tokens[first:], dtype=torch.float32) * 10 + layer * 2 + side
                assert torch.equal(found, expected[:, None, None].expand_as(found))

    # For machines whose steps are followed by kernels

    stream: int | None = None

    def prepare(self, lengths: dict[int, int]) -> None:
        """Kernels over these tokens are about to be launched."""

    def launch_prepared(self) -> None:
        """They are launched now, at the latest."""

    def write(self, reqid: int, position: int, value: int) -> None:
        for layer in range(2):
            for side, tensor in enumerate(self.cache.layer(layer)):
                tensor[reqid, position] = value * 10 + layer * 2 + side

    def pages(self, lengths: dict[int, int]) -> int:
        """Pages that all running requests need after a step to `lengths`."""
        after = {r: len(t) for r, t in self.tokens.items()} | lengths
        return sum(self.cache.pages_needed(n) for n in after.values())

    def books(self) -> tuple[int, dict[int, int]]:
        return self.cache.stats().live_tokens, {p.reqid: p.length for p in self.cache.page_map() if p.active}


TestCache = CacheMachine.TestCase
TestCache.settings = examples()
