"""Memory that each kind of KV cache needs for the same tokens, and the most that it can waste per request.

Reproduces "block size and worst-case waste" (Table 8) and extends it to the paper's traces: the log-normal request
lengths of "Traces", each request at a random moment of its decode. This is arithmetic only, by `vattn.layout` and the
paged backend's rule, over the shapes of Llama-3-8B; tests/bench checks on a small cache that as many pages are really
mapped.
"""

from __future__ import annotations

from typing import Any

from bench.harness import theme
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.traces import SEED, TRACES
from vattn import TensorGroup, layout

ABOUT = "physical over live bytes: static, paged, and virtual by layout and page size"
QUESTION = "How much memory is lost in last blocks and pages?"

_LAYERS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_GROUP = TensorGroup(layers=range(_LAYERS), num_kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, dtype="bfloat16")
_TOKEN_BYTES = _GROUP.token_bytes
_BLOCK_SIZE = 16
_PAGE_SIZES = tuple(2**power for power in range(16, 22))
_MIB = 2**20


def run(quick: bool) -> Report:
    lengths, longest = {}, {}
    for trace in TRACES:
        lengths[trace.name], longest[trace.name] = trace.lengths(100 if quick else trace.requests)

    def row(backend: str, order: str, page: int, block: int, waste: int, held: dict[str, int]) -> Row:
        """`held`: bytes that all requests of a trace hold."""
        fixed: Row = {
            "backend": backend,
            "kv order": order,
            "page KiB": page // 1024,
            "block tokens": block,
            "worst waste MiB": waste / _MIB,
        }
        return fixed | {name: total / (sum(lengths[name]) * _TOKEN_BYTES) for name, total in held.items()}

    most = max(longest.values())
    block_bytes = _BLOCK_SIZE * _TOKEN_BYTES
    figures = [
        row(
            "static",
            "-",
            0,
            most,
            (most - 1) * _TOKEN_BYTES,
            {name: len(ns) * longest[name] * _TOKEN_BYTES for name, ns in lengths.items()},
        ),
        row(
            "paged",
            "-",
            0,
            _BLOCK_SIZE,
            block_bytes - _TOKEN_BYTES,
            {name: sum(-(-n // _BLOCK_SIZE) for n in ns) * block_bytes for name, ns in lengths.items()},
        ),
    ]
    geometries: dict[tuple[str, str, int], layout.Layout] = {}
    orders: tuple[layout.KVOrder, ...] = ("NHD", "HND")
    for name in layout.LAYOUTS:
        for order in orders:
            for page_size in _PAGE_SIZES:
                geometry = layout.build(
                    name,
                    order,
                    groups=[_GROUP],
                    slots=1,
                    tokens=most,
                    page_size=page_size,
                )
                geometries[name, order, page_size] = geometry
                held = {trace: sum(map(geometry.pages, ns)) * page_size for trace, ns in lengths.items()}
                backend = f"virtual, {name}"
                figures.append(row(backend, order, page_size, geometry.page_tokens, geometry.worst_waste, held))

    def table_8(name: str, page_size: int, block_tokens: int, waste_mib: int) -> list[Goal]:
        geometry = geometries[name, "NHD", page_size]
        what = f"{name}, NHD, {page_size // 1024} KiB pages"
        return [
            Goal(f"block tokens: {what}", geometry.page_tokens, "==", block_tokens),
            Goal(f"worst waste in MiB per request: {what}", geometry.worst_waste / _MIB, "<=", waste_mib),
        ]

    return Report(
        parameters={
            "kind": "arithmetic",
            "layers": _LAYERS,
            "kv_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "dtype": "bfloat16",
            "block_size": _BLOCK_SIZE,
            "seed": SEED,
            "requests": {name: len(ns) for name, ns in lengths.items()},
            "mean_tokens": {name: round(sum(ns) / len(ns)) for name, ns in lengths.items()},
            "static_tokens": longest,
        },
        figures=figures,
        goals=[
            *table_8("layer", 2 * _MIB, 1024, 128),
            *table_8("layer", 64 * 1024, 32, 4),
            *table_8("sliced", 2 * _MIB, 32, 4),
        ],
        timed=False,
    )


def compare(record: Record) -> list[Comparison]:
    largest = max(row["page KiB"] for row in record["figures"])

    def pages(name: str) -> dict[str, Any]:
        return {"backend": f"virtual, {name}", "kv order": "NHD", "page KiB": largest}

    traces = list(record["parameters"]["requests"])

    def over(says: str, kind: str, name: str) -> Comparison:
        pairs = (pair for trace in traces for pair in rows(record, trace, {"backend": kind}, pages(name)))
        return Comparison(says, record, tuple(pairs))

    size = f"pages of {largest // 1024} MiB"
    return [
        over(f"Blocks of 16 tokens take {{}} times the memory of {size} in layout `sliced`", "paged", "sliced"),
        over(f"Blocks of 16 tokens take {{}} times the memory of {size} in layout `layer`", "paged", "layer"),
        over(f"A static reservation takes {{}} times the memory of {size} in layout `sliced`", "static", "sliced"),
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    static, paged = rows[0], rows[1]
    trace = list(static)[-1]
    largest = max(row["page KiB"] for row in rows)
    waste = {"paged, blocks of 16 tokens": 100 * (paged[trace] - 1)}
    for row in rows[2:]:
        if row["page KiB"] == largest:
            kind = row["backend"].removeprefix("virtual, ")
            waste[f"virtual, {kind}, {row['kv order']}"] = 100 * (row[trace] - 1)
    theme.bars(axes, waste, [name for name in waste if name.startswith("virtual")])
    least = min(value for name, value in waste.items() if name.startswith("virtual"))
    axes.set_title(
        f"Pages of {largest / 1024:g} MiB waste {least:.1f} to {max(waste.values()):.0f} % of the memory, by layout; "
        f"a static reservation wastes {100 * (static[trace] - 1):.0f} %"
    )
    axes.set(xlabel="wasted memory, in % of what the tokens need")
