"""The cost of address space: time to reserve it, and the kernel's page tables for it.

Own result, beside the paper's "reserve 2 us" (Table 3): a cache reserves addresses for the longest context of every
slot, far more than there is memory. A new process reserves them by the host's driver, one range per virtual tensor of
Llama-3-8B, and then backs one request of 1,000 tokens. Page tables are `VmPTE` of the process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from bench.harness import theme
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row

ABOUT = "time and page tables of reserving up to 10 TiB of address space"
QUESTION = "What does it cost to reserve addresses?"

_GIB = 2**30
_SIZES = (64, 1024, 10_240)  # GiB
_SLOTS = 64
_CHILD = """
import json, sys, time
from pathlib import Path
import vattn
def kib():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmPTE:")[2].split()[0])
tokens = int(sys.argv[1])
config = vattn.KVConfig(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", max_batch_size=int(sys.argv[2]),
                        max_context_len=tokens, memory_budget="512MiB", page_size=65536, layout="layer", kv_order="NHD",
                        overlap=False, eager_pages=0)
vattn.KVCache(vattn.KVConfig(num_layers=1, num_kv_heads=1, head_dim=64, dtype="bfloat16", max_batch_size=1,
                             max_context_len=64, memory_budget="1MiB")).close()  # what is made once for a process
before, start = kib(), time.perf_counter()
cache = vattn.KVCache(config)
seconds, reserved = time.perf_counter() - start, kib()
cache.step({cache.alloc_reqid(): 1000})
print(json.dumps([cache.stats().reserved_bytes, seconds, reserved - before, kib() - before]))
cache.close()
"""


def run(quick: bool) -> Report:
    figures: list[Row] = []
    for size in _SIZES[::2] if quick else _SIZES:
        tokens = size * _GIB // (_SLOTS * 128 * 1024)
        taken = []
        for _ in range(1 if quick else 5):
            command = [sys.executable, "-c", _CHILD, str(tokens), str(_SLOTS)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            taken.append(json.loads(done.stdout))
        reserved, seconds, before, after = (statistics.median(column) for column in zip(*taken, strict=True))
        figures.append(
            {
                "addresses GiB": round(reserved / _GIB),
                "tokens per slot": tokens,
                "make a cache ms": 1e3 * seconds,
                "page tables, reserved KiB": float(before),
                "page tables, 1000 tokens KiB": float(after),
            }
        )
    first, last = figures[0], figures[-1]
    return Report(
        parameters={"model": "Llama-3-8B, bfloat16", "slots": _SLOTS, "page": 65536, "processes": 1 if quick else 5},
        figures=figures,
        goals=[
            Goal("page tables for 10 TiB of addresses, KiB", float(last["page tables, reserved KiB"]), "<=", 1024),
            Goal(
                "making a cache of 10 TiB over one of 64 GiB",
                float(last["make a cache ms"]) / float(first["make a cache ms"]),
                "<=",
                2,
            ),
        ],
    )


def compare(record: Record) -> list[Comparison]:
    first, last = (record["figures"][index] for index in (0, -1))
    sizes = [{"addresses GiB": row["addresses GiB"]} for row in (last, first)]
    return [
        Comparison(
            f"A cache over {last['addresses GiB']:,} GiB of addresses takes {{}} times as long to make as one over "
            f"{first['addresses GiB']:,} GiB",
            record,
            rows(record, "make a cache ms", *sizes),
            higher_is_better=False,
        )
    ]


def draw(axes: Any, record: Record) -> None:
    figures = record["figures"]
    names = [f"{row['addresses GiB']:,} GiB" for row in figures]
    theme.bars(axes, dict(zip(names, (row["make a cache ms"] for row in figures), strict=True)), names)
    last = figures[-1]
    axes.set_title(
        f"{names[-1]} of addresses take {last['make a cache ms']:.1f} ms, and {last['page tables, reserved KiB']:.0f} "
        "KiB of page tables"
    )
    axes.set_xlabel("time to make a cache, in ms")
