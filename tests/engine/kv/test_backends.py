"""One contract for every KV backend, and what is each one's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.backends import PAGED_WINDOWS
from vattn import drivers
from vattn.attention import PackedBatch, Span
from vattn.engine.kv import make
from vattn.engine.kv.base import KVBackend, NoPrefixCache
from vattn.engine.kv.dynamic import DynamicKV
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.slot_book import SlotBook
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.static import StaticKV
from vattn.engine.kv.virtual import VirtualKV
from vattn.errors import (
    ConfigError,
    InvalidLength,
    InvalidSlot,
    InvalidTokens,
    NoFreeSlot,
    OutOfPages,
    TokenMismatch,
    VattnError,
)
from vattn.packed import KVShape

LAYERS, HEADS, DIM, V_DIM, SLOTS, LENGTH = 2, 2, 8, 12, 4, 300
TOKEN_BYTES = LAYERS * HEADS * (DIM + V_DIM) * 4


SHAPE = KVShape.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, v_head_dim=V_DIM)


def make_backend(kv: str, budget: int = 1 << 20, length: int = LENGTH) -> KVBackend:
    options: dict[str, Any] = {"virtual": {"page_size": 4096, "eager_pages": 0, "guard": "strict"}}.get(kv, {})
    if kv == PAGED_WINDOWS:
        kv, options = "paged", {"windows": True}
    return make.make_backend(
        kv,
        KVSpec(
            SHAPE,
            block_size=64 if options.get("windows") else 16,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_num_seqs=SLOTS,
            max_model_len=length,
            memory_budget=budget,
            kv_options=options,
        ),
    )


def test_paged_takes_the_number_of_its_blocks() -> None:
    def paged(**options: Any) -> KVBackend:
        spec = KVSpec(SHAPE, max_num_seqs=SLOTS, max_model_len=LENGTH, memory_budget=1 << 20, kv_options=options)
        return make.make_backend("paged", spec)

    block_bytes = 16 * TOKEN_BYTES
    for asked in (1, 7, (1 << 20) // block_bytes):
        backend = paged(num_blocks=asked)
        assert isinstance(backend, PagedKV)
        assert backend.num_blocks == asked
    for options, message in (
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": (1 << 20) // block_bytes + 1}, "memory_budget is 1.0 MiB; give more memory or fewer blocks"),
        (
            {"num_blocks": 4, "page_size": 4096},
            r"only takes num_blocks, windows as kv_options, but was given \['page_size'\]",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            paged(**options)


def test_paged_gathers_into_memory_that_it_counts() -> None:
    """None before the first `read`, which kernels that follow the block table never call; then as much as is read."""
    backend = make_backend("paged")
    assert isinstance(backend, PagedKV)
    pool = backend.num_blocks * 16 * TOKEN_BYTES
    most = -(-LENGTH // 16) * 16 * TOKEN_BYTES // LAYERS
    slot = backend.allocate(LENGTH)
    model = Model(backend)
    sizes = [backend.stats().physical_bytes]
    for start, end in ((0, 40), (40, 41), (41, 200), (200, LENGTH)):
        model.store([Span(slot, start, end)])
        model.compare()
        stats = backend.stats()
        assert stats.physical_bytes == stats.peak_physical_bytes == stats.reserved_bytes
        assert end * TOKEN_BYTES // LAYERS <= stats.physical_bytes - pool <= most
        sizes.append(stats.physical_bytes)
    assert sizes[0] == pool
    assert sizes[1] == sizes[2] < sizes[3] < sizes[4]
    backend.close()


class Model:
    """The naive store: per layer and slot, a list of rows."""

    def __init__(self, backend: KVBackend) -> None:
        self.backend = backend
        self.lengths: dict[int, int] = {}
        self.rows: dict[tuple[int, int, int], torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def store(self, spans: list[Span]) -> None:
        self.backend.prepare({span.slot: span.end for span in spans})
        batch = PackedBatch(tuple(spans))  # in any order
        for layer in range(LAYERS):
            key = torch.randn(batch.num_tokens, HEADS, DIM, generator=self.generator)
            value = torch.randn(batch.num_tokens, HEADS, V_DIM, generator=self.generator)
            # As the attention function gets them: the heads first in memory.
            self.backend.write(
                layer,
                batch,
                key.transpose(0, 1).contiguous().transpose(0, 1),
                value.transpose(0, 1).contiguous().transpose(0, 1),
            )
            row = 0
            for span in batch.spans:
                for position in range(span.start, span.end):
                    self.rows[layer, span.slot, position] = torch.cat([key[row], value[row]], dim=-1)
                    row += 1
        for span in spans:
            self.lengths[span.slot] = span.end

    def compare(self, start: int = 0) -> None:
        for slot, length in self.lengths.items():
            first = min(start, length - 1)
            for layer in range(LAYERS):
                key, value = self.backend.read(layer, slot, length, first)
                assert key.shape == (1, HEADS, length - first, DIM)
                assert value.shape == (1, HEADS, length - first, V_DIM)
                assert key.stride(-1) == value.stride(-1) == 1
                got = torch.cat([key[0], value[0]], dim=-1).transpose(0, 1)
                want = torch.stack([self.rows[layer, slot, t] for t in range(first, length)])
                assert torch.equal(got, want), f"layer {layer} of slot {slot}"


def test_what_is_written_is_read(kv: str) -> None:
    """Mixed batches, random chunks, slots used again: every row of every layer is where it was put."""
    rng = random.Random(0)
    backend = make_backend(kv)
    model = Model(backend)
    with torch.inference_mode():
        for _ in range(60):
            if len(model.lengths) < SLOTS and rng.random() < 0.5:
                model.lengths[backend.allocate(10)] = 0
            spans = []
            for slot, length in model.lengths.items():
                more = rng.choice([1, 1, 1, 2, 17, 40])
                if length + more <= LENGTH and (length == 0 or rng.random() < 0.7):
                    spans.append(Span(slot, length, length + more))
            if spans:
                model.store(spans)
                model.compare(start=rng.choice([0, 0, 5, 16, 33, LENGTH]))
            full = [slot for slot, length in model.lengths.items() if length > LENGTH - 40]
            for slot in full:
                backend.free(slot)
                del model.lengths[slot]
            backend.check()
    backend.close()


@pytest.mark.parametrize("lengths", [(1, 1), (7,), (1, 1, 7), (7, 30), (1, 7, 30, 1)])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv", ["virtual", "static", PAGED_WINDOWS])
def test_other_devices_store_what_cpus_do(
    kv: str, packed: bool, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One indexed store, or a slice beside it: all tokens come where they belong, and nothing else changes."""
    written = []
    for on_cpu in (True, False):
        if not on_cpu:
            monkeypatch.setattr("vattn.engine.kv.contiguous.cpu.store", lambda *_: False)
        backend = make_backend(kv)
        slots = [backend.allocate(LENGTH) for _ in range(SLOTS)]
        backend.prepare(dict.fromkeys(slots, LENGTH))
        generator = torch.Generator().manual_seed(0)
        whole = PackedBatch.pack([Span(slot, 0, LENGTH) for slot in slots])
        chunks = [Span(slot, 50 + slot, 50 + slot + n) for slot, n in zip(slots, lengths, strict=False)]
        batch = PackedBatch.pack(chunks) if packed else PackedBatch(tuple(chunks))
        for rows in (whole, batch):
            for layer in range(LAYERS):
                key, value = (torch.randn(rows.num_tokens, HEADS, dim, generator=generator) for dim in (DIM, V_DIM))
                backend.write(layer, rows, key, value)
        written.append(
            [side.clone() for at in range(LAYERS) for slot in slots for side in backend.read(at, slot, LENGTH)]
        )
        backend.close()
    assert all(map(torch.equal, *written))


class Stores(TorchDispatchMode):
    """Counts what would be launches on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("lengths", "stores"), [((1, 1), 2), ((7,), 2), ((1, 1, 7), 4), ((1, 7, 30, 9), 2)])
def test_other_devices_store_several_chunks_at_once(
    lengths: tuple[int, ...], stores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vattn.engine.kv.contiguous.cpu.store", lambda *_: False)
    backend = make_backend("virtual")
    slots = [backend.allocate(LENGTH) for _ in lengths]
    backend.prepare(dict(zip(slots, lengths, strict=True)))
    batch = PackedBatch.pack([Span(slot, 0, n) for slot, n in zip(slots, lengths, strict=True)])
    assert len(batch.slots) == len(batch.positions)  # builds both
    with Stores() as launched:
        backend.write(0, batch, *(torch.randn(sum(lengths), HEADS, dim) for dim in (DIM, V_DIM)))
    backend.close()
    assert launched.count == stores


def test_lengths_go_down_and_up_at_no_cost(kv: str) -> None:
    """Drafts: a few tokens are stored, some of them taken back, and others written in their place."""
    rng = random.Random(1)
    backend = make_backend(kv)
    model = Model(backend)
    with torch.inference_mode():
        model.lengths = dict.fromkeys((backend.allocate(10), backend.allocate(10)), 0)
        while max(model.lengths.values()) < LENGTH - 8:
            model.store([Span(slot, length, length + rng.randint(1, 8)) for slot, length in model.lengths.items()])
            available = backend.available()
            lower = {slot: max(1, length - rng.randint(0, 6)) for slot, length in model.lengths.items()}
            backend.prepare(lower)
            model.lengths = dict(lower)
            assert backend.available() >= available
            backend.check()
            model.compare(start=rng.choice([0, 30]))
        for slot in model.lengths:
            backend.free(slot)
    assert backend.available() == backend.total()
    assert backend.stats().live_bytes == 0
    backend.close()


def test_allocate_gives_every_slot_once(kv: str) -> None:
    backend = make_backend(kv)
    slots = [backend.allocate(5) for _ in range(SLOTS)]
    assert sorted(slots) == list(range(SLOTS))
    with pytest.raises(NoFreeSlot, match=str(SLOTS)):
        backend.allocate(5)
    backend.free(slots[2])
    assert backend.allocate(5) == slots[2]
    backend.close()


def test_units_add_up(kv: str) -> None:
    """`prepare` takes what `needed` said, out of `available`; `free` gives all of it back."""
    backend = make_backend(kv)
    assert backend.available() == backend.total()
    slot = backend.allocate(5)
    assert backend.needed(0, slot) == 0
    for length in (1, 2, 16, 17, 100, LENGTH):
        before, needed = backend.available(), backend.needed(length, slot)
        backend.prepare({slot: length})
        # A backend may take some ahead for the next step, never less than what it said.
        assert backend.available() <= before - needed
        assert backend.needed(length, slot) == 0
        assert backend.needed(length) > 0
        backend.check()
    backend.free(slot)
    assert backend.available() == backend.total()
    backend.close()


def test_out_of_pages_changes_nothing(growing_kv: str) -> None:
    backend = make_backend(growing_kv, budget=LENGTH * TOKEN_BYTES * 3 // 2)
    model = Model(backend)
    with torch.inference_mode():
        first, second = backend.allocate(5), backend.allocate(5)
        model.lengths = {first: 0, second: 0}
        model.store([Span(first, 0, 200), Span(second, 0, 20)])
        needed = (backend.needed(LENGTH, first), backend.needed(LENGTH, second))
        available = backend.available()
        assert sum(needed) > available
        with pytest.raises(OutOfPages) as caught:
            backend.prepare({first: LENGTH, second: LENGTH})
        assert caught.value.missing_pages > 0
        assert caught.value.missing_bytes > 0
        assert (backend.needed(LENGTH, first), backend.needed(LENGTH, second)) == needed
        assert backend.available() == available
        backend.check()
        model.compare()
        backend.free(second)
        del model.lengths[second]
        model.store([Span(first, 200, LENGTH)])
        model.compare()
    backend.close()


def test_unknown_slots(kv: str) -> None:
    backend = make_backend(kv)
    slot = backend.allocate(5)
    for act in (
        lambda: backend.free(slot + 1),
        lambda: backend.prepare({slot: 1, slot + 1: 1}),
        lambda: backend.needed(1, slot + 1),
    ):
        with pytest.raises(InvalidSlot, match=str(slot + 1)):
            act()
    backend.check()
    backend.close()


def test_a_length_past_the_longest(kv: str) -> None:
    backend = make_backend(kv)
    slot = backend.allocate(5)
    with pytest.raises(VattnError, match=str(LENGTH + 1)):
        backend.prepare({slot: LENGTH + 1})
    backend.check()
    backend.close()


def test_stats(kv: str) -> None:
    backend = make_backend(kv)
    slots = [backend.allocate(5) for _ in range(3)]
    lengths = dict(zip(slots, (1, 50, 200), strict=True))
    with torch.inference_mode():
        Model(backend).store([Span(slot, 0, length) for slot, length in lengths.items()])
    stats = backend.stats()
    assert stats.live_bytes == 251 * TOKEN_BYTES
    assert stats.live_bytes <= stats.used_bytes <= stats.physical_bytes <= stats.reserved_bytes
    assert stats.physical_bytes <= stats.peak_physical_bytes
    assert stats.waste_bytes == stats.used_bytes - stats.live_bytes
    # Memory for more tokens than a request has, taken ahead, is no token.
    backend.prepare({slots[0]: LENGTH})
    ahead = backend.stats().used_bytes
    backend.prepare(lengths)
    assert backend.stats().live_bytes == 251 * TOKEN_BYTES
    assert 251 * TOKEN_BYTES <= backend.stats().used_bytes <= ahead
    assert backend.needed(LENGTH, slots[0]) <= backend.available()
    backend.check()
    for slot in slots:
        backend.free(slot)
    assert (backend.stats().used_bytes, backend.stats().live_bytes) == (0, 0)
    backend.close()


# Sharing. A token block has 16 tokens in the paged backend, 64 over windows, 256 in the virtual one.

PROMPT = list(range(280))
WHOLE = {"paged": 272, PAGED_WINDOWS: 256, "virtual": 256}


def serve(model: Model, ids: list[int], salt: bytes = b"") -> tuple[int, int]:
    """Admits, computes and commits a request; the slot, and what had been cached."""
    backend = model.backend
    found = backend.find(ids, salt)
    slot, cached = backend.admit(ids, salt)
    assert found <= cached < found + backend.prefix_block_tokens
    if cached:
        origin = next(other for other in model.lengths if (0, other, 0) in model.rows)
        for layer in range(LAYERS):
            for position in range(cached):
                model.rows[layer, slot, position] = model.rows[layer, origin, position]
    model.lengths[slot] = cached
    model.store([Span(slot, cached, len(ids))])
    backend.commit(slot, ids)
    return slot, cached


def test_a_cached_prefix_is_read_where_it_was_not_written(caching_kv: str) -> None:
    backend = make_backend(caching_kv)
    model = Model(backend)
    first, cached = serve(model, PROMPT)
    assert cached == 0
    used = backend.stats().used_bytes
    for _ in range(2):
        _, cached = serve(model, PROMPT)
        assert cached == WHOLE[caching_kv]
        model.compare()
        backend.check()
    stats = backend.stats()
    assert stats.used_bytes < 2 * used
    assert stats.live_bytes <= stats.used_bytes <= stats.physical_bytes
    backend.free(first)
    del model.lengths[first]
    model.compare()
    backend.close()


def test_other_salts_and_other_tokens_share_nothing(caching_kv: str) -> None:
    backend = make_backend(caching_kv)
    model = Model(backend)
    serve(model, PROMPT, b"one")
    assert serve(model, PROMPT, b"two")[1] == 0
    assert serve(model, [7, *PROMPT[1:]], b"one")[1] == 0
    model.compare()
    backend.check()
    backend.close()


def test_a_fork_reads_the_same_and_writes_its_own(kv: str) -> None:
    backend = make_backend(kv)
    model = Model(backend)
    parent, _ = serve(model, PROMPT)
    child = backend.fork(parent)
    for layer in range(LAYERS):
        for position in range(280):
            model.rows[layer, child, position] = model.rows[layer, parent, position]
    model.lengths[child] = 280
    backend.check()
    model.compare()
    model.store([Span(parent, 280, 290), Span(child, 280, 300)])
    model.compare()
    backend.free(parent)
    del model.lengths[parent]
    model.compare()
    backend.check()
    backend.free(child)
    assert backend.available() == backend.total()
    backend.check()
    backend.close()


def test_a_fork_without_memory_changes_nothing(growing_kv: str) -> None:
    backend = make_backend(growing_kv, budget=LENGTH * TOKEN_BYTES * 11 // 10)
    model = Model(backend)
    slots = [serve(model, PROMPT)[0]]
    with pytest.raises(OutOfPages) as caught:  # for the copy of its last block, or of all
        while True:
            slots.append(backend.fork(slots[0]))
    assert caught.value.missing_pages > 0
    assert caught.value.missing_bytes > 0
    backend.check()
    model.compare()
    for slot in slots:
        backend.free(slot)
    assert backend.available() == backend.total()
    backend.close()


def test_cached_memory_is_available_and_gives_way(caching_kv: str) -> None:
    backend = make_backend(caching_kv, budget=LENGTH * TOKEN_BYTES * 5 // 2)
    model = Model(backend)
    slot, _ = serve(model, PROMPT)
    backend.free(slot)
    assert backend.available() == backend.total()
    model.lengths.clear()
    slots = [backend.allocate(LENGTH) for _ in range(2)]
    assert backend.needed(LENGTH) * 2 <= backend.available()
    backend.prepare(dict.fromkeys(slots, LENGTH))
    backend.check()
    assert backend.admit(PROMPT).cached_tokens < WHOLE[caching_kv]
    backend.close()


def test_eviction_spares_what_is_used(caching_kv: str) -> None:
    backend = make_backend(caching_kv)
    model = Model(backend)
    slot, _ = serve(model, PROMPT)
    assert backend.evict_prefixes() == 0
    backend.free(slot)
    assert backend.evict_prefixes() > 0
    assert backend.admit(PROMPT).cached_tokens == 0
    backend.check()
    backend.close()


def test_bad_sharing_changes_nothing(caching_kv: str) -> None:
    backend = make_backend(caching_kv)
    slot, _ = serve(Model(backend), PROMPT)
    for ids in (PROMPT[:10], [*PROMPT, 1], [9, *PROMPT[1:]]):
        with pytest.raises(TokenMismatch):
            backend.commit(slot, ids)
    for ids in ([], [0] * (LENGTH + 1)):
        with pytest.raises(InvalidLength):
            backend.admit(ids)
    with pytest.raises(InvalidTokens):
        backend.admit(PROMPT, "salt")  # type: ignore[arg-type]
    for act in (lambda: backend.fork(slot + 1), lambda: backend.commit(slot + 1, [])):
        with pytest.raises(InvalidSlot):
            act()
    for _ in range(SLOTS - 1):
        backend.fork(slot)
    for act in (lambda: backend.fork(slot), lambda: backend.admit(PROMPT)):
        with pytest.raises(NoFreeSlot):
            act()
    backend.check()
    backend.close()


def test_retract_takes_back_what_a_slot_committed_first(caching_kv: str) -> None:
    backend = make_backend(caching_kv)
    first, _ = backend.admit(PROMPT)
    backend.prepare({first: len(PROMPT)})
    half = PROMPT[: backend.prefix_block_tokens]
    backend.commit(first, half)
    second, found = backend.admit(PROMPT)
    assert found > 0
    backend.prepare({second: len(PROMPT)})
    backend.commit(second, PROMPT)
    fork = backend.fork(first)
    backend.retract(first)
    backend.check()
    probe, found = backend.admit(PROMPT)
    assert found == 0, "a prefix whose start is gone cannot be found"
    backend.free(probe)
    backend.commit(first, half)
    backend.commit(fork, half)
    backend.commit(second, PROMPT)
    backend.check()
    third, again = backend.admit(PROMPT)
    assert again == 0, "a retracted block was published again"
    for slot in (first, second, third, fork):
        backend.free(slot)
    backend.check()
    backend.close()


@pytest.mark.parametrize("ended", [False, True])
def test_retract_takes_back_what_was_computed_on_it(caching_kv: str, ended: bool) -> None:
    backend = make_backend(caching_kv, 2 << 20, 1000)
    size = backend.prefix_block_tokens
    prompt = [*range(3 * size + 1)]
    first, _ = backend.admit(prompt[: size + 1])
    backend.prepare({first: size})
    backend.commit(first, prompt[:size])
    second, found = backend.admit(prompt)
    assert found == size
    backend.prepare({second: 2 * size})
    backend.commit(second, prompt[: 2 * size])
    if ended:
        backend.free(second)
    backend.retract(first)
    backend.check()
    if not ended:  # nor is what it computes later found
        backend.prepare({second: 3 * size})
        backend.commit(second, prompt[: 3 * size])
        backend.check()
    again, found = backend.admit(prompt[: size + 1])
    assert found == 0
    backend.prepare({again: size})
    backend.commit(again, prompt[:size])
    assert backend.find(prompt) == size
    # Nothing keeps it from being computed anew.
    third, _ = backend.admit(prompt)
    backend.prepare({third: 2 * size})
    backend.commit(third, prompt[: 2 * size])
    assert backend.find(prompt) == 2 * size
    for slot in (first, again, third) if ended else (first, second, again, third):
        backend.free(slot)
    backend.check()
    backend.evict_prefixes()
    assert backend.available() == backend.total()
    backend.close()


def test_retract_takes_back_what_was_computed_on_it_and_by_the_slot_too(caching_kv: str) -> None:
    backend = make_backend(caching_kv, 2 << 20, 1000)
    size = backend.prefix_block_tokens
    prompt = [*range(2 * size + 1)]
    first, _ = backend.admit(prompt)
    backend.prepare({first: size})
    backend.commit(first, prompt[:size])
    second, found = backend.admit(prompt)
    assert found == size
    for slot in (second, first):
        backend.prepare({slot: 2 * size})
        backend.commit(slot, prompt[: 2 * size])
    backend.retract(first)
    backend.check()
    third, found = backend.admit(prompt)
    assert found == 0
    backend.prepare({third: size})
    backend.commit(third, prompt[:size])
    assert backend.find(prompt) == size
    backend.close()


def test_retract_leaves_what_others_committed(caching_kv: str) -> None:
    backend = make_backend(caching_kv)
    first, _ = backend.admit(PROMPT)
    backend.prepare({first: len(PROMPT)})
    backend.commit(first, PROMPT)
    second, found = backend.admit(PROMPT)
    backend.prepare({second: len(PROMPT)})
    backend.commit(second, PROMPT)
    backend.retract(second)
    assert backend.admit(PROMPT).cached_tokens == found > 0
    with pytest.raises(InvalidSlot):
        backend.retract(SLOTS + 1)
    backend.check()
    backend.close()


@pytest.mark.parametrize("runs", [False, True])
def test_retract_takes_back_what_ended_slots_committed(caching_kv: str, runs: bool) -> None:
    backend = make_backend(caching_kv, 2 << 20, 1000)
    size = backend.prefix_block_tokens
    prompt = [*range(3 * size + 1)]
    for blocks in (1, 2) if runs else (1, 2, 3):
        slot, found = backend.admit(prompt)
        assert found == (blocks - 1) * size
        backend.prepare({slot: blocks * size})
        backend.commit(slot, prompt[: blocks * size])
        if blocks < 2 or not runs:
            backend.free(slot)
    backend.retract_tokens(prompt[: 2 * size], b"", size + 1)
    backend.check()
    assert backend.find(prompt) == size
    if runs:  # what it computes on the second block is not found
        backend.prepare({slot: 3 * size})
        backend.commit(slot, prompt[: 3 * size])
        backend.free(slot)
        backend.check()
    again, found = backend.admit(prompt)
    assert found == size
    backend.prepare({again: 2 * size})
    backend.commit(again, prompt[: 2 * size])
    assert backend.find(prompt) == 2 * size
    backend.free(again)
    backend.check()
    backend.retract_tokens(prompt, b"salt", 0)
    assert backend.find(prompt) == 2 * size
    with pytest.raises(InvalidTokens):
        backend.retract_tokens(["a"], b"", 0)  # type: ignore[list-item]
    with pytest.raises(InvalidLength):
        backend.retract_tokens([], b"", 0)
    backend.evict_prefixes()
    assert backend.available() == backend.total()
    backend.close()


def test_retain_frees_all_others(kv: str) -> None:
    backend = make_backend(kv)
    model = Model(backend)
    slots = [backend.allocate(50) for _ in range(3)]
    model.store([Span(slot, 0, 50) for slot in slots])
    backend.retain([slots[1]])
    model.lengths = {slots[1]: 50}
    backend.check()
    model.compare()
    assert {backend.allocate(5) for _ in range(2)} == {slots[0], slots[2]}
    backend.retain([])
    backend.check()
    assert backend.available() == backend.total()
    backend.close()


@pytest.mark.parametrize("kv", ["paged", PAGED_WINDOWS, "static", "dynamic"])
def test_numbers_that_are_none(kv: str) -> None:
    """Refused before anything changes; numpy's are numbers like any other."""
    backend = make_backend(kv)
    slot = backend.allocate(5)
    other = backend.allocate(5)
    before = backend.available()
    for length in (-1, 2.0, float("nan"), True, None, "5", np.float32(3), 2**40, torch.tensor([1, 2])):
        with pytest.raises(InvalidLength):
            backend.prepare({other: 5, slot: length})  # type: ignore[dict-item]
    for bad in (True, 0.0, "0", None, -1, 10**30):
        for act in (lambda bad: backend.prepare({bad: 5}), backend.free, backend.fork):
            with pytest.raises(InvalidSlot):
                act(bad)  # type: ignore[arg-type]
    assert backend.available() == before
    backend.prepare({np.int64(slot): np.int32(40)})  # type: ignore[dict-item]
    backend.check()
    backend.free(np.int64(slot))  # type: ignore[arg-type]
    backend.check()
    backend.close()


def test_check_sees_books_that_are_wrong() -> None:
    def spoiled(kv: str, spoil: Callable[[Any, int], object]) -> None:
        backend: Any = make_backend(kv)
        slot, _ = backend.admit(PROMPT)
        backend.prepare({slot: len(PROMPT)})
        backend.commit(slot, PROMPT)
        backend.check()
        spoil(backend, slot)
        with pytest.raises(AssertionError):
            backend.check()

    for spoil in (
        lambda b, slot: b._free.pop(),
        lambda b, slot: b._free.append(b._slots[slot].blocks[0].number),
        lambda b, slot: b._slots[slot].blocks.reverse(),
        lambda b, slot: b._slots[slot].tokens.__setitem__(0, 77),
        lambda b, slot: setattr(b._slots[slot], "length", 5),
        lambda b, slot: setattr(b._slots[slot].blocks[0], "users", 2),
        lambda b, slot: b._slots._returned.append(slot),
        lambda b, slot: b.block_table[slot].add_(1),
    ):
        spoiled("paged", spoil)
    spoiled("static", lambda b, slot: b._prepared.clear())
    spoiled("static", lambda b, slot: dict.__delitem__(b._lengths, slot))
    spoiled("dynamic", lambda b, slot: setattr(b, "_granted", b._granted + 1))


def test_slots_are_handed_out_from_the_first() -> None:
    slots: SlotBook[int] = SlotBook(3, 10)
    assert [slots.take(0) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(NoFreeSlot):
        slots.take(0)
    for slot in (2, 0):
        del slots[slot]
    slots.check()
    assert [slots.take(0), slots.take(0)] == [0, 2]


def test_a_backend_without_a_prefix_cache_finds_nothing() -> None:
    class Plain(NoPrefixCache):
        def allocate(self, num_tokens: int) -> int:
            return num_tokens

    assert Plain().admit(PROMPT) == (280, 0)
    assert Plain().find(PROMPT) == 0
    Plain().commit(0, PROMPT)
    assert Plain().evict_prefixes() == 0


class BackendMachine(RuleBasedStateMachine):
    """Random operations against the arithmetic of lengths; each backend's own `check` after every one."""

    kv: str

    def __init__(self) -> None:
        super().__init__()
        self.backend = make_backend(self.kv, budget=96 << 10)
        self.lengths: dict[int, int] = {}
        self.kinds: dict[int, int] = {}  # the token that all of the request's are

    @precondition(lambda self: len(self.lengths) < SLOTS)
    @rule(hint=st.integers(1, LENGTH))
    def allocate(self, hint: int) -> None:
        try:
            slot = self.backend.allocate(hint)
        except NoFreeSlot:
            assert self.kv == "static"
            assert len(self.lengths) == self.backend.total()
        else:
            assert slot not in self.lengths
            self.lengths[slot] = 0

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), min_size=1, unique=True))
        lengths = {slot: data.draw(st.integers(max(1, self.lengths[slot]), LENGTH)) for slot in slots}
        announced = {slot: data.draw(st.integers(length, LENGTH)) for slot, length in lengths.items()}
        needed = sum(self.backend.needed(length, slot) for slot, length in lengths.items())
        fits = needed <= self.backend.available()
        try:
            self.backend.prepare(lengths, announced)
        except OutOfPages:
            assert not fits, "refused what available() and needed() had promised"
        else:
            self.write([Span(slot, self.lengths[slot], n) for slot, n in lengths.items() if n > self.lengths[slot]])
            self.lengths.update(lengths)

    def write(self, spans: list[Span]) -> None:
        batch = PackedBatch.pack(spans)
        for layer in range(LAYERS if spans else 0):
            key, value = (torch.zeros(batch.num_tokens, HEADS, dim) for dim in (DIM, V_DIM))
            self.backend.write(layer, batch, key, value)

    @precondition(lambda self: len(self.lengths) < SLOTS)
    @rule(kind=st.integers(0, 1), length=st.integers(1, LENGTH))
    def admit(self, kind: int, length: int) -> None:
        before = self.backend.available()
        try:
            slot, cached = self.backend.admit([kind] * length)
        except NoFreeSlot:
            assert self.kv == "static"
            return
        assert slot not in self.lengths
        assert cached < length
        assert self.backend.available() <= before
        self.lengths[slot] = cached
        self.kinds[slot] = kind

    @precondition(lambda self: self.kinds)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.kinds)))
        self.backend.commit(slot, [self.kinds[slot]] * self.lengths[slot])

    @precondition(lambda self: 0 < len(self.lengths) < SLOTS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.lengths)))
        try:
            slot = self.backend.fork(source)
        except OutOfPages:
            return
        except NoFreeSlot:
            assert self.kv == "static"
            assert len(self.lengths) == self.backend.total()
            return
        assert slot not in self.lengths
        self.lengths[slot] = self.lengths[source]
        if source in self.kinds:
            self.kinds[slot] = self.kinds[source]

    @rule()
    def evict(self) -> None:
        self.backend.evict_prefixes()

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        self.backend.free(slot)
        del self.lengths[slot]
        self.kinds.pop(slot, None)

    @invariant()
    def books_balance(self) -> None:
        self.backend.check()
        stats = self.backend.stats()
        assert stats.live_bytes <= sum(self.lengths.values()) * TOKEN_BYTES
        assert stats.live_bytes <= stats.used_bytes
        assert 0 <= self.backend.available() <= self.backend.total()
        if not self.lengths:
            assert self.backend.available() == self.backend.total()

    def teardown(self) -> None:
        self.backend.close()


def test_random_operations(kv: str) -> None:
    machine = type(f"{kv.title()}Machine", (BackendMachine,), {"kv": kv})
    quick = settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)
    run_state_machine_as_test(machine, settings=quick)


# The paged backend's own


def test_paged_wastes_less_than_a_block_per_request() -> None:
    backend = make_backend("paged")
    slots = {backend.allocate(1): length for length in (1, 16, 17, 250)}
    backend.prepare(slots)
    block = 16 * TOKEN_BYTES
    assert backend.stats().waste_bytes == block * sum(-(-n // 16) for n in slots.values()) - 284 * TOKEN_BYTES
    assert backend.stats().waste_bytes < len(slots) * block
    backend.close()


def test_paged_block_tables() -> None:
    backend = make_backend("paged")
    assert isinstance(backend, PagedKV)
    first, second = backend.allocate(1), backend.allocate(1)
    backend.prepare({first: 33, second: 10})
    table = torch.full((SLOTS, backend.max_blocks), -1, dtype=torch.int32)
    view = backend.fill_block_tables([second, first], table)
    assert view.shape == (2, 3)
    assert view.data_ptr() == table.data_ptr()
    blocks = view[1, :3].tolist() + view[0, :1].tolist()
    assert len(set(blocks)) == 4, "a block is in two requests"
    assert (table[2:] == -1).all()
    backend.close()


def test_paged_lists_the_blocks_of_each_slot() -> None:
    backend = make_backend("paged")
    first = backend.allocate(40)
    backend.prepare({first: 40})
    second = backend.fork(first)
    lists = backend.block_lists()
    assert lists.keys() == {first, second}
    assert lists[first][:2] == lists[second][:2]
    assert lists[first] == backend.block_table[first, :3].tolist()
    assert len({*lists[first], *lists[second]}) == 4, "the last block, which is not whole, is copied"


def test_paged_bad_sizes() -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        PagedKV(KVSpec(KVShape.uniform(1, 1, 1, 1), max_num_seqs=1, max_model_len=1, block_size=0), num_blocks=1)


# The static backend's own


def test_static_lies_in_memory_as_virtual_does() -> None:
    """Token and head strides decide how fast a kernel reads; virtual pads a head's rows to whole pages."""
    static, virtual = make_backend("static"), make_backend("virtual")
    for backend in (static, virtual):
        slot = backend.allocate(1)
        backend.prepare({slot: 100})
    for own, other in zip(static.read(0, 0, 100), virtual.read(0, 0, 100), strict=True):
        assert own.stride()[2:] == other.stride()[2:] == (own.shape[-1], 1)
        assert own.stride(1) == LENGTH * own.shape[-1]
    static.close()
    virtual.close()


def test_static_has_as_many_slots_as_the_budget_holds() -> None:
    backend = make_backend("static", budget=LENGTH * TOKEN_BYTES * 5 // 2)
    assert isinstance(backend, StaticKV)
    stats = backend.stats()
    assert stats.physical_bytes == stats.reserved_bytes == 2 * LENGTH * TOKEN_BYTES
    slots = [backend.allocate(LENGTH), backend.allocate(1)]
    with pytest.raises(NoFreeSlot, match="all 2 slots"):
        backend.allocate(1)
    backend.prepare(dict.fromkeys(slots, 1))
    assert backend.available() == 0
    assert backend.stats().waste_bytes == 2 * (LENGTH - 1) * TOKEN_BYTES
    backend.close()


def test_static_refuses_what_the_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers.find("cpu"), "available_memory", lambda: 1 << 10, raising=False)
    with pytest.raises(ConfigError, match="4 slots of 300 tokens"):
        make_backend("static")


# The dynamic backend's own


def test_dynamic_holds_what_was_written_and_copies_to_grow() -> None:
    backend = make_backend("dynamic")
    assert isinstance(backend, DynamicKV)
    slot = backend.allocate(1)
    backend.prepare({slot: 100})
    assert backend.stats().physical_bytes == 0
    with torch.inference_mode():
        model = Model(backend)
        model.lengths = {slot: 0}
        model.store([Span(slot, 0, 100)])
        before = backend.read(0, slot, 100)[0]
        model.store([Span(slot, 100, 101)])
        after = backend.read(0, slot, 101)[0]
    assert before.data_ptr() != after.data_ptr()
    stats = backend.stats()
    assert stats.physical_bytes == stats.used_bytes == stats.live_bytes == 101 * TOKEN_BYTES
    # Beside the first layer, which has grown, the second one in its old size and in its new one.
    assert stats.peak_physical_bytes == (101 + 100 + 101) * TOKEN_BYTES // 2
    backend.close()


def test_dynamic_without_memory_for_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys have not grown then, and nothing is counted."""
    backend = make_backend("dynamic")
    slot = backend.allocate(1)
    model = Model(backend)
    model.store([Span(slot, 0, 5)])
    before = backend.stats()
    cat = torch.cat
    with monkeypatch.context() as patched:

        def fails(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
            if tensors[0].shape[-1] == V_DIM:
                raise torch.OutOfMemoryError
            return cat(tensors, dim=dim)

        patched.setattr(torch, "cat", fails)
        with pytest.raises(torch.OutOfMemoryError):
            model.store([Span(slot, 5, 9)])
    assert backend.stats() == before
    backend.check()
    model.compare()
    model.store([Span(slot, 5, 9)])
    model.compare()
    backend.free(slot)
    assert backend.stats().physical_bytes == 0
    backend.close()


def test_what_other_requests_can_have_is_not_used() -> None:
    """Pages left mapped from a longer request, and those mapped ahead, are for whoever needs them."""
    backend = make_backend("virtual")
    assert isinstance(backend, VirtualKV)
    long = backend.allocate(LENGTH)
    backend.prepare({long: LENGTH})
    backend.free(long)
    short = backend.allocate(LENGTH)
    backend.prepare({short: 1})
    stats = backend.cache.stats()
    assert stats.surplus_pages > 0
    assert stats.owned_pages - stats.surplus_pages == backend.cache.layout.pages(1)
    assert backend.stats().used_bytes == stats.needed_bytes
    assert backend.total() - backend.available() == stats.owned_pages - stats.surplus_pages
    backend.close()
