"""The caches of `generate()`: time of a decode step, and memory.

Reproduces the classic "DynamicCache against StaticCache" and adds `VirtualCache`. One model, batch size 1; the caches
are filled with random rows, so that no prefill is computed, and their decode steps are interleaved. StaticCache is
measured at its exact final length, which nobody knows in advance, and at twice that. Memory is the peak of the
process's resident set, from an empty cache to the last step. Finally every cache grows in chunks to the longest
context, without a model, to show the time of a chunk and the resident memory after it.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

import vattn
from bench.harness import theme
from bench.harness.models import CACHE
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave

ABOUT = "transformers' caches: decode steps and memory of dynamic, static and virtual"
QUESTION = "What does `VirtualCache` save in `generate()`?"

_MAX_CONTEXT = 131_072
_LONGEST = 196_608
_CHUNK = 16_384
_FILL = 2048
_WARMUP = 3
_MIB = 2**20
_HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS = 8, 4, 64, 8
_OTHERS = ("dynamic", "static", "static x2")
_JUDGED_CONTEXT = 8192


def run(quick: bool) -> Report:
    contexts = (64,) if quick else (512, 2048, 8192, 16_384)
    judged = contexts[-1] if quick else _JUDGED_CONTEXT
    rounds = 3 if quick else 25
    static, longest, chunk = (1024, 2048, 1024) if quick else (_MAX_CONTEXT, _LONGEST, _CHUNK)
    figures: list[Row] = []
    series: dict[str, list[float]] = {}
    reserved: dict[str, str] = {}
    growth: dict[str, str] = {}
    overhead: list[float] = []
    geometry = ""
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = _model(dtype)
        for context in contexts:
            row, over, geometry = _case(model, context, rounds)
            figures.append({"dtype": name, "context": context, **row})
            overhead.append(over)
        resident, _, _ = _peak(_filled(model, StaticCache(model.config, max_cache_len=static), 1))
        reserved[name] = f"{resident / _MIB:.0f} MiB for {_token_bytes(dtype) / _MIB:.2f} MiB of K and V"
        for kind, make in _makers(model, longest).items():
            if kind == "static x2":
                continue
            seconds, sizes = _grow(make, longest, chunk, dtype)
            series[f"{name}, {kind}: ms per {chunk} tokens"] = [1e3 * s for s in seconds]
            series[f"{name}, {kind}: resident MiB"] = [size / _MIB for size in sizes]
            growth[f"{name}, {kind}"] = (
                f"{1e3 * seconds[0]:.0f} ms for the first, {1e3 * seconds[-1]:.0f} for the last; "
                f"{sizes[0] / _MIB:.0f} and {sizes[-1] / _MIB:.0f} MiB resident after them"
            )

    worst = min(figures, key=lambda row: row["fastest other / virtual"])
    at = {str(row["dtype"]): row for row in figures if row["context"] == judged}
    return Report(
        parameters={
            "model": f"{_LAYERS} layers, hidden 512, {_HEADS} heads, {_KV_HEADS} KV heads of {_HEAD_DIM}",
            "threads": torch.get_num_threads(),
            "max_context_len": _MAX_CONTEXT,
            "virtual (last case)": geometry,
            "rounds": rounds,
            f"StaticCache of {static} that holds one token": reserved,
            f"growing to {longest} tokens by {chunk}": growth,
        },
        figures=figures,
        goals=[
            Goal(
                f"fastest other over virtual, time (least, {worst['dtype']} at {worst['context']})",
                float(worst["fastest other / virtual"]),
                ">=",
                0.98,
            ),
            Goal(
                f"dynamic over virtual, float32, {judged} tokens", float(at["float32"]["dynamic / virtual"]), ">=", 1.15
            ),
            Goal(
                f"dynamic over virtual, bfloat16, {judged} tokens", float(at["bfloat16"]["dynamic / virtual"]), ">=", 5
            ),
            Goal(f"static over virtual, bfloat16, {judged} tokens", float(at["bfloat16"]["static / virtual"]), ">=", 2),
            Goal("virtual: memory over 1.02 x live tokens + a block per tensor (most)", max(overhead), "<=", 1),
        ],
        series=series,
    )


def _case(model: PreTrainedModel, context: int, rounds: int) -> tuple[Row, float, str]:
    """A row, the virtual cache's memory relative to its bound, and its geometry."""
    dtype = model.dtype
    steps = rounds + _WARMUP
    makers = _makers(model, context + steps)
    times = _decode(model, makers, context, rounds)
    ratios = {kind: _ratio(times[kind], times["virtual"]) for kind in _OTHERS}
    live = (context + steps) * _token_bytes(dtype)
    row: Row = {
        **{f"{kind} ms": 1e3 * median(times[kind]) for kind in makers},
        "dynamic / virtual": ratios["dynamic"],
        "static / virtual": ratios["static"],
        "fastest other / virtual": min(ratios.values()),
        "live MiB": live / _MIB,
    }
    for kind, make in makers.items():
        resident, shared, cache = _peak(lambda make=make: _decoded(model, make(), context, steps))  # type: ignore[misc]
        row[f"{kind} MiB"] = resident / _MIB
        if isinstance(cache, vattn.VirtualCache):
            geometry = repr(cache)
            overhead = shared / (1.02 * live + _block_bytes(cache, dtype))
            cache.close()
    return row, overhead, geometry


def _model(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=_HEADS * _HEAD_DIM,
        intermediate_size=1408,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=_LONGEST,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    model.train(False)
    return model


def _makers(model: PreTrainedModel, length: int) -> dict[str, Callable[[], Cache]]:
    """How to make each cache, for one sequence that ends with `length` tokens."""
    config = model.config
    return {
        "dynamic": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config, max_cache_len=length),
        "static x2": lambda: StaticCache(config, max_cache_len=2 * length),
        "virtual": lambda: vattn.VirtualCache(model, max_context_len=max(_MAX_CONTEXT, length)),
    }


def _token_bytes(dtype: torch.dtype) -> int:
    return 2 * _LAYERS * _KV_HEADS * _HEAD_DIM * dtype.itemsize


def _block_bytes(cache: vattn.VirtualCache, dtype: torch.dtype) -> int:
    """Bytes of one token block in each of the tensors."""
    stats = cache.stats()
    rows = stats.page_size // (_HEAD_DIM * dtype.itemsize)
    return rows * _token_bytes(dtype)


@torch.no_grad()
def _fill(cache: Cache, length: int, dtype: torch.dtype) -> Cache:
    """Stores random K and V as a chunked prefill would."""
    for start in range(0, length, _FILL):
        rows = torch.randn(1, _KV_HEADS, min(_FILL, length - start), _HEAD_DIM).to(dtype)
        for layer in range(_LAYERS):
            cache.update(rows, rows, layer)
    return cache


def _step(model: PreTrainedModel, cache: Cache) -> Callable[[], None]:
    token = torch.ones(1, 1, dtype=torch.int64)

    def step() -> None:
        with torch.no_grad():
            model(token, **{CACHE: cache})

    return step


def _decode(
    model: PreTrainedModel, makers: dict[str, Callable[[], Cache]], context: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of decode steps with every cache, interleaved."""
    caches = {kind: _fill(make(), context, model.dtype) for kind, make in makers.items()}
    return interleave({kind: _step(model, cache) for kind, cache in caches.items()}, rounds, warmup=_WARMUP)


def _filled(model: PreTrainedModel, cache: Cache, length: int) -> Callable[[], Cache]:
    return lambda: _fill(cache, length, model.dtype)


def _decoded(model: PreTrainedModel, cache: Cache, context: int, steps: int) -> Cache:
    step = _step(model, _fill(cache, context, model.dtype))
    for _ in range(steps):
        step()
    return cache


@torch.no_grad()
def _grow(make: Callable[[], Cache], length: int, chunk: int, dtype: torch.dtype) -> tuple[list[float], list[int]]:
    """Seconds to append each chunk up to `length` tokens, and the bytes resident after it."""
    _settle()
    before = _status("VmRSS")
    rows = torch.randn(1, _KV_HEADS, chunk, _HEAD_DIM).to(dtype)
    cache = make()
    seconds, resident = [], []
    for _ in range(0, length, chunk):
        start = time.perf_counter()
        for layer in range(_LAYERS):
            cache.update(rows, rows, layer)
        seconds.append(time.perf_counter() - start)
        resident.append(_status("VmRSS") - before)
    return seconds, resident


def _ratio(ones: list[float], others: list[float]) -> float:
    """The median quotient of calls in the same round, since whatever slows a round down affects both."""
    return median(one / other for one, other in zip(ones, others, strict=True))


def _peak(action: Callable[[], Cache]) -> tuple[int, int, Cache]:
    """Growth of the resident set during an action, at its peak, and growth of its shared memory; and what it returned.

    A virtual cache's pages are shared memory; the resident set also has bookkeeping and activations.
    """
    _settle()
    before, shared = _status("VmRSS"), _status("RssShmem")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    result = action()
    return _status("VmHWM") - before, _status("RssShmem") - shared, result


def _settle() -> None:
    """Returns freed memory to the kernel; otherwise the next cache would reuse it and not show in the resident set."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "A step over `DynamicCache` takes {} times as long as over `VirtualCache`",
            record,
            columns(record, "dynamic ms", "virtual ms"),
        ),
        Comparison(
            "A step over a `StaticCache` of exactly the right size takes {} times as long",
            record,
            columns(record, "static ms", "virtual ms"),
        ),
        Comparison(
            "`DynamicCache` holds {} times as much memory", record, columns(record, "dynamic MiB", "virtual MiB")
        ),
        Comparison(
            "A `StaticCache` of twice the size holds {} times as much memory",
            record,
            columns(record, "static x2 MiB", "virtual MiB"),
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    dtype = record["figures"][-1]["dtype"]
    rows = [row for row in record["figures"] if row["dtype"] == dtype]
    contexts = [row["context"] for row in rows]
    caches = {
        "virtual": ("virtual", "VirtualCache"),
        "static": ("static", "StaticCache, exact size"),
        "static x2": ("other", "StaticCache, twice the size"),
        "dynamic": ("dynamic", "DynamicCache"),
    }
    for kind, (name, label) in caches.items():
        axes.plot(contexts, [row[f"{kind} ms"] for row in rows], **theme.style(name), label=label)
    dynamic, static = (
        theme.more_time(rows[-1][f"{kind} ms"] / rows[-1]["virtual ms"]) for kind in ("dynamic", "static")
    )
    axes.set_title(
        f"A decode step of generate() at {contexts[-1]:,} tokens, over VirtualCache's: DynamicCache {dynamic}, "
        f"a StaticCache of the exact size {static}"
    )
    axes.set(xlabel="tokens in the cache", ylabel=f"milliseconds per step, {dtype}", ylim=(0, None))
    theme.doublings(axes, contexts)
