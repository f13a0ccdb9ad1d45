"""Memory that each kind of cache takes for the same requests, by the number that run at a time.

Reproduces the classic "StaticCache against DynamicCache memory" (2048 reserved tokens of which 69 to 79 % are wasted)
and the memory half of "paged against dynamic" (paged takes 0.87 of dynamic): the demo's queue, all at once, through the
engine with each backend, and the most that running requests hold. Other load on the machine does not affect bytes.
"""

from __future__ import annotations

from typing import Any, Literal

from bench.demo_queue import MAX_TOKENS, Queue, run_queue
from bench.harness import theme
from bench.harness.held import held_bytes
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn.engine.kv.make import BACKENDS

ABOUT = "memory of each kind of cache for the same requests, by how many run at a time"
QUESTION = "How much memory do the same requests take?"

_MIB = 2**20
_MAX_MODEL_LEN = 2048
# As kernels for CPUs read it fastest, a page of the demo's model has 32 tokens of one head, twice as many as a block;
# in the other order it has 16 tokens of both.
_SIDES: tuple[tuple[str, str, dict[str, str]], ...] = (
    *((kv, kv, {}) for kv in BACKENDS),
    ("virtual NHD", "virtual", {"kv_order": "NHD"}),
)


def run(quick: bool) -> Report:
    queue = Queue.load()
    counts, max_tokens = ((1, 4), 20) if quick else ((1, 2, 4, 8, 16, len(queue.texts)), MAX_TOKENS)
    figures: list[Row] = []
    for count in counts:
        peaks, waste, tokens = {}, {}, []
        for name, kv, options in _SIDES:
            done = run_queue(
                queue.first(count),
                max_tokens=max_tokens,
                kv=kv,
                kv_options=options,
                max_num_seqs=count,
                max_num_batched_tokens=512,
                max_model_len=_MAX_MODEL_LEN,
            )
            stats = [record.kv for record in done.records]
            peaks[name] = max(held_bytes(kv, each) for each in stats) / _MIB
            waste[name] = sum(s.waste_bytes for s in stats) / max(1, sum(s.used_bytes for s in stats))
            tokens = done.cached_tokens
        figures.append(
            {
                "requests": count,
                "mean tokens": sum(tokens) / count,
                **{f"{name} MiB": peak for name, peak in peaks.items()},
                **{f"{name} waste %": 100 * share for name, share in waste.items() if name != "dynamic"},
            }
        )

    last = figures[-1]

    def ratio(one: str, other: str, relation: Literal["<=", ">="], bound: float) -> Goal:
        value = float(last[f"{one} MiB"]) / float(last[f"{other} MiB"])
        return Goal(f"{one} over {other}, {last['requests']} requests", value, relation, bound)

    return Report(
        parameters={
            "model": "demo/model, float32",
            "max_model_len": _MAX_MODEL_LEN,
            "MiB": "at the peak: what running requests hold; static: all slots; dynamic: with the copy to grow by",
            "waste": "share of the memory of running requests that holds no token, mean over the steps",
            "block_size": 16,
            "virtual NHD": "kv_order='NHD': all heads of a token side by side, so that a page has fewer tokens",
        },
        figures=figures,
        goals=[
            Goal("static: waste %, least", min(float(row["static waste %"]) for row in figures), ">=", 65),
            ratio("paged", "dynamic", "<=", 1),
            ratio("static", "paged", ">=", 4),
            ratio("static", "virtual", ">=", 4),
        ],
        timed=False,
    )


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"`{kv}` holds {{}} times as much memory as `{virtual}`",
            record,
            columns(record, f"{kv} MiB", f"{virtual} MiB"),
        )
        for kv, virtual in (
            ("paged", "virtual"),
            ("paged", "virtual NHD"),
            ("static", "virtual"),
            ("dynamic", "virtual"),
        )
        if f"{virtual} MiB" in record["figures"][0]
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    requests = [row["requests"] for row in rows]
    for kv in ("static", "virtual", "paged", "dynamic"):
        axes.plot(requests, [row[f"{kv} MiB"] for row in rows], **theme.style(kv), label=kv)
    static, virtual, paged = (theme.number(rows[-1][f"{kv} MiB"]) for kv in ("static", "virtual", "paged"))
    axes.set_title(f"For {requests[-1]} requests at a time static holds {static} MiB, virtual {virtual}, paged {paged}")
    axes.set(yscale="log", xlabel="requests at a time", ylabel="MiB held at the peak")
    theme.doublings(axes, requests)
