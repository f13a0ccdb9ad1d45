"""Every benchmark runs and records what it promises; what one computes instead of measuring agrees with real caches."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vattn
from bench import cases
from bench.__main__ import main
from bench.harness import plot
from bench.harness.discovery import find
from bench.harness.traces import TRACES
from vattn.config import build_layout

pytestmark = pytest.mark.slow(1)

NEEDS_VLLM = pytest.mark.skipif("VATTN_VLLM_PYTHON" not in os.environ, reason="VATTN_VLLM_PYTHON names no vLLM")
CASES = find(cases)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other, for seconds if other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Some start servers or engines in processes of their own, or need five seconds even so.
MARKS = dict.fromkeys(("plugin", "shared_budget"), NEEDS_VLLM) | dict.fromkeys(
    ("mla", "reserve", "roles", "serving", "shared", "simulate", "speculate", "threads", "throughput"), pytest.mark.long
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_quick_run_records_valid_json_and_can_be_drawn(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / f"{name}.json"
    assert main([name, "--quick", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert (record["name"], record["quick"]) == (name, True)
    for key in (
        "parameters",
        "hardware",
        "kernel",
        "versions",
        "commit",
        "dirty",
        "date",
        "foreign_cores",
        "contended",
    ):
        assert key in record
    assert {"torch", "transformers", "vattn", "python"} == set(record["versions"])
    assert len({tuple(row) for row in record["figures"]}) == 1, "rows differ in their columns"
    for goal in record["goals"]:
        assert f"goal {goal['what']}: {'met' if goal['met'] else 'NOT met'}" in printed
    assert record["goals"]
    if CASES[name].draw_source is not None:
        image = tmp_path / f"{name}.svg"
        plot.draw_record(CASES[name], record, image, "digest of the record")
        assert "digest of the record" in image.read_text()
    for comparison in getattr(CASES[name].load(), "compare", lambda _: [])(record):
        assert comparison.says.count("{}") == 1
        assert not comparison.pairs or comparison.median > 0


@pytest.mark.parametrize("kv_order", ["NHD", "HND"])
@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
def test_arithmetic_is_what_a_real_cache_maps(layout: str, kv_order: str) -> None:
    """The traces scaled down to a small cache: every slot and the sum, in pages really mapped."""
    lengths = [max(1, n // 256) for trace in TRACES for n in trace.lengths(8)[0]]
    for page_size in (4096, 16384, 65536):
        config = vattn.KVConfig(
            num_layers=3,
            num_kv_heads=2,
            head_dim=16,
            dtype=torch.bfloat16,
            max_batch_size=len(lengths),
            max_context_len=1024,
            memory_budget="512MiB",
            page_size=page_size,
            layout=layout,  # type: ignore[arg-type]
            kv_order=kv_order,  # type: ignore[arg-type]
            overlap=False,
            eager_pages=0,
        )
        expected = [build_layout(config, layout, page_size).pages(n) for n in lengths]  # type: ignore[arg-type]
        with vattn.KVCache(config) as cache:
            slots = [cache.alloc_reqid() for _ in lengths]
            cache.step(dict(zip(slots, lengths, strict=True)))
            pages = {slot.reqid: slot.pages for slot in cache.page_map()}
            assert [pages[slot] for slot in slots] == expected
            stats = cache.stats()
            assert stats.owned_bytes == stats.created_bytes == sum(expected) * page_size
            assert stats.calls["cuMemMap"].count == sum(expected)
            cache.check()
