"""Memory that nobody can use: within what requests hold, and between them.

Extends "block size and worst-case waste" by the other half of the classic story: *external* fragmentation. Requests of
the paper's trace "sample" come and go in one budget; each holds memory from its admission to its end, and a request
waits until there is room for it. *exact* knows the final length and takes one contiguous range of that size, first fit;
*static* reserves the longest; *paged* takes blocks, *virtual* pages of 2 MiB, both anywhere. What counts is the moment
when the next request does not fit: what running requests hold without a token in it is internal waste, and what is free
then, external. Arithmetic only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean
from typing import Any

from bench.harness import theme
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.traces import TRACES
from vattn import layout
from vattn.model_shapes import find_shape

ABOUT = "internal and external fragmentation: a contiguous range per request, blocks, and pages"
QUESTION = "How much memory is lost between requests?"

_BUDGET = 40 * 2**30
_PAGE = 2**21
_BLOCK = 16
_SEED = 0


def run(quick: bool) -> Report:
    (group,) = find_shape("Llama-3-8B").groups
    lengths, longest = TRACES[-1].lengths(300 if quick else 3000)
    pages = layout.build("sliced", "NHD", groups=[group], slots=1, tokens=longest, page_size=_PAGE)
    token = group.token_bytes
    sizes: dict[str, Callable[[int], int]] = {
        "static": lambda tokens: longest * token,
        "exact": lambda tokens: tokens * token,
        "paged": lambda tokens: -(-tokens // _BLOCK) * _BLOCK * token,
        "virtual, sliced": lambda tokens: pages.pages(tokens) * _PAGE,
    }
    figures: list[Row] = []
    for kind, size in sizes.items():
        requests, internal, external = _serve(lengths, size, token, contiguous=kind in ("static", "exact"))
        figures.append(
            {
                "cache": kind,
                "requests at a time": requests,
                "internal %": 100 * internal / _BUDGET,
                "external %": 100 * external / _BUDGET,
            }
        )
    of = {str(row["cache"]): row for row in figures}
    return Report(
        parameters={
            "kind": "arithmetic",
            "model": "Llama-3-8B, bfloat16",
            "budget GiB": _BUDGET // 2**30,
            "trace": TRACES[-1].name,
            "requests": len(lengths),
            "page": _PAGE,
            "block": _BLOCK,
            "seed": _SEED,
        },
        figures=figures,
        goals=[
            Goal(f"external %, {kind}", float(of[kind]["external %"]), "<=", 3) for kind in ("paged", "virtual, sliced")
        ],
        timed=False,
    )


def _serve(
    lengths: list[int], size: Callable[[int], int], token_bytes: int, *, contiguous: bool
) -> tuple[float, float, float]:
    """Means over the moments when a request does not fit: running requests, bytes wasted in them, and bytes free.

    Each request runs for a random time; the one that ends first leaves when room is needed.
    """
    draw = random.Random(_SEED)
    running: list[tuple[float, int, int, int]] = []  # end, offset, bytes, tokens
    seen: list[tuple[int, int, int]] = []
    now = 0.0
    for tokens in lengths:
        need = size(tokens)
        while (offset := _place(running, need, contiguous=contiguous)) is None:
            used = sum(held for _, _, held, _ in running)
            live = sum(each * token_bytes for *_, each in running)
            seen.append((len(running), used - live, _BUDGET - used))
            first = min(running)
            running.remove(first)
            now = first[0]
        running.append((now + draw.expovariate(1), offset, need, tokens))
    columns = zip(*seen[len(seen) // 4 :], strict=True)  # once the budget has been full for a while
    requests, internal, external = (mean(column) for column in columns)
    return requests, internal, external


def _place(running: list[tuple[float, int, int, int]], need: int, *, contiguous: bool) -> int | None:
    """Where a request goes: the first hole that is large enough, or anywhere."""
    if not contiguous:
        return 0 if sum(held for _, _, held, _ in running) + need <= _BUDGET else None
    start = 0
    for offset, held in sorted((offset, held) for _, offset, held, _ in running):
        if offset - start >= need:
            return start
        start = offset + held
    return start if _BUDGET - start >= need else None


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"Pages of 2 MiB serve {{}} times as many requests at a time as {name}",
            record,
            rows(record, "requests at a time", {"cache": "virtual, sliced"}, {"cache": kind}),
        )
        for kind, name in (
            ("paged", "blocks of 16 tokens"),
            ("exact", "contiguous ranges of exactly the final size"),
            ("static", "reservations of the longest"),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    figures = record["figures"]
    names = [row["cache"] for row in figures]
    internal = [row["internal %"] for row in figures]
    external = [row["external %"] for row in figures]
    axes.barh(names, internal, color=theme.OURS, label="internal: held, without a token")
    axes.barh(names, external, left=internal, color=theme.OTHERS, label="external: free, but not for the next one")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    lost = {row["cache"]: row["internal %"] + row["external %"] for row in figures}
    axes.set_title(
        f"When the next request does not fit, {lost['static']:.0f} % of the memory hold no token with static, "
        f"{lost['exact']:.0f} % with contiguous ranges, {lost['virtual, sliced']:.1f} % with pages"
    )
    axes.set_xlabel("memory without a token, in % of the budget")
