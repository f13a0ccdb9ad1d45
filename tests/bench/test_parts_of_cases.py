"""What several benchmarks are made of: traces, prompts, driver calls, and what is counted on the critical path."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import closing
from statistics import mean
from typing import Any

import pytest
import torch

import vattn
from bench.cases import kernels_paged, padded
from bench.cases.fragmentation import TRACES
from bench.harness import allocation
from bench.harness.critical_path import watching
from bench.harness.driver_calls import PAPER, MemoryCalls, time_range
from bench.harness.models import TINY, qwen2
from bench.harness.prefill_loop import PrefillLoop
from bench.harness.trace import Arrival, log_normal, play
from vattn import _native, packed
from vattn.engine import LLM
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV

SIZES = TINY | {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 512}


def small_cache(**options: Any) -> vattn.KVConfig:
    return vattn.KVConfig(
        **{
            "num_layers": 2,
            "num_kv_heads": 2,
            "head_dim": 16,
            "dtype": torch.bfloat16,
            "max_batch_size": 3,
            "max_context_len": 512,
            "memory_budget": "4MiB",
            "page_size": 4096,
            **options,
        }
    )


def test_a_scaled_trace_has_the_means_of_its_lengths() -> None:
    trace = TRACES[1]
    arrivals = log_normal(trace.prompt, trace.output, 2000, 100, divisors=(64, 8), longest=4096)
    for lengths, (middle, deviation), divisor in (
        ([len(arrival.prompt) for arrival in arrivals], trace.prompt, 64),
        ([arrival.output for arrival in arrivals], trace.output, 8),
    ):
        assert mean(lengths) == pytest.approx(math.exp(middle + deviation**2 / 2) / divisor, rel=0.05)
    assert all(arrival.time == 0 for arrival in arrivals)


def test_a_trace_is_cut_at_the_longest_request_and_begins_with_what_is_shared() -> None:
    arrivals = log_normal((9, 0.5), (6, 0.6), 50, 100, divisors=(1, 1), longest=128, rate=10, shared=[7] * 16)
    for arrival in arrivals:
        assert arrival.prompt[:16] == [7] * 16
        assert len(arrival.prompt) + arrival.output <= 128
    times = [arrival.time for arrival in arrivals]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5)


def test_requests_are_timed_from_when_they_were_to_arrive() -> None:
    """All latencies are at least what the engine's own clock says, which begins when a request is added."""
    arrivals = [Arrival(0.0, [1] * 20, 8), Arrival(0.0, [2] * 5, 3), Arrival(0.01, [3] * 9, 1)]
    with LLM(qwen2(**SIZES), skip_tokenizer_init=True, max_model_len=64, memory_budget="8MiB", num_threads=1) as llm:
        played = play(llm, arrivals)
    assert [timing.output_tokens for timing in played.timings] == [8, 3, 1]
    assert [len(output.prompt_token_ids) for output in played.outputs] == [20, 5, 9]
    for timing, output in zip(played.timings, played.outputs, strict=True):
        own = output.metrics.time_to_first_token
        assert own is not None
        assert own <= timing.ttft <= timing.e2el <= played.seconds
    summary = played.summary({"e2el": 1e6})
    assert summary["request_goodput"] == summary["request_throughput"] == pytest.approx(3 / played.seconds)


def test_calls_on_the_critical_path_are_all_calls_without_overlap_and_none_where_memory_is_mapped() -> None:
    options = {"overlap": False, "eager_pages": 0, "watermark": 0}
    with closing(VirtualKV(small_cache(**options))) as kv:
        with watching(kv) as cold:
            slot = kv.allocate(100)
            kv.prepare({slot: 100})
        assert cold.map_calls == kv.stats().map_calls > 0
        assert cold.calls == 1
        assert cold.seconds > 0
        kv.free(slot)
        with watching(kv) as warm:
            kv.prepare({kv.allocate(100): 100})
        assert (warm.map_calls, warm.calls) == (0, 0)
        assert "prepare" not in vars(kv), "the backend is as it was"


def test_a_range_of_pages_is_taken_down_again() -> None:
    before = _native.host_usage()
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    time_range(MemoryCalls(_native.host_table(), _native.host_prop(4096)), 4096, 3, seconds)
    after = _native.host_usage()
    assert (after.handles, after.reservations) == (before.handles, before.reservations)
    assert {name for name, _ in seconds} == PAPER.keys()
    assert {key: len(each) for key, each in seconds.items() if key[0] == "cuMemMap"} == {("cuMemMap", 1): 6}
    with pytest.raises(RuntimeError, match="cuMemUnmap"):
        MemoryCalls(_native.host_table(), _native.host_prop(4096)).unmap(4096, 4096)


@pytest.mark.parametrize("overlap", [False, True])
def test_allocation_gives_every_slot_its_length_and_takes_it_back(overlap: bool) -> None:
    with vattn.KVCache(
        small_cache(overlap=overlap, deferred_reclamation=False, eager_pages=0, watermark=0, layout="sliced")
    ) as cache:
        pages = 3 * cache.layout.pages(128)
        for measure in (allocation.in_the_step, allocation.ahead) if overlap else (allocation.in_the_step,):
            row = measure(cache, 128)
            assert row["pages"] == pages
            assert float(row["GB/s"]) == pytest.approx(pages * 4096 / 1e6 / float(row["ms"]))
            assert cache.stats().mapped_pages == 0


@pytest.mark.parametrize("chunk", [None, 48])
def test_a_prompt_takes_a_slot_and_gives_it_back(chunk: int | None) -> None:
    model = qwen2(**SIZES)
    shape = packed.kv_shape(model)
    spec = KVSpec(shape, max_num_seqs=1, max_model_len=128, dtype=model.dtype)
    with (
        closing(PagedKV(spec, num_blocks=8)) as kv,
        closing(PrefillLoop(model, kv, chunk=chunk)) as loop,
    ):
        for _ in range(2):
            seconds, preparing = loop.prefill(128)
            assert 0 < preparing < seconds
            assert kv.available() == 8
        kv.check()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_sides_of_a_block_table_compute_the_same(kind: str) -> None:
    sides: dict[str, Any] = {name: action() for name, action in kernels_paged._actions(kind, 96).items()}
    for name in ("neighbours", "scattered"):
        assert torch.equal(sides[name], sides["contiguous"])
    theirs = sides["torch"]
    rows = theirs[0].transpose(0, 1) if kind == "prefill" else torch.stack([each.view(14, 64) for each in theirs])
    torch.testing.assert_close(rows, sides["contiguous"], atol=0.02, rtol=0.02)


def test_lists_make_the_table_that_is_gathered() -> None:
    spec = KVSpec(packed.KVShape.uniform(1, 1, 8, 8), max_num_seqs=3, max_model_len=64, dtype=torch.float32)
    with closing(PagedKV(spec, num_blocks=12)) as kv:
        slots = [kv.allocate(64) for _ in range(3)]
        kv.prepare(dict(zip(slots, (64, 16, 40), strict=True)))
        lists = [kv.block_lists()[slot] for slot in slots]
        made = padded._pad(lists)
        kept = kv.fill_block_tables(slots, torch.zeros(3, 4, dtype=torch.int32))
        assert made.shape == kept.shape
        for blocks, one, other in zip(lists, made.tolist(), kept.tolist(), strict=True):
            assert one[: len(blocks)] == other[: len(blocks)] == blocks
