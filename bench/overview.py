"""The overview at the top of README: what vattn is worth to each kind of reader, from the committed records.

Shorter bars are better, except in the panels of throughput, whose titles say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench.harness.records import Record

BENCHMARKS = ("cache", "memory", "step", "throughput")

# Legible on white and on black: the contrast of the text is above 4 with both.
_TEXT, _OTHERS, _OURS = "#777777", "#9a9a9a", "#3b82f6"
_ENGINES = {
    "vllm": "vLLM (CPU build)",
    "static": "vattn's engine, static",
    "virtual": "vattn's engine",
    "paged": "vattn's engine, paged",
    "dynamic": "vattn's engine, dynamic",
    "generate_batch": "transformers, generate_batch",
    "generate": "transformers, generate",
}

Bar = tuple[str, float]


def draw(figure: Any, records: Mapping[str, Record]) -> None:
    """Six panels of bars on a figure.

    Args:
        records: the record of each benchmark in `BENCHMARKS`, all of one machine.
    """
    panels = figure.subplots(3, 2)
    step, peak = _caches(records["cache"])
    tokens = records["cache"]["figures"][-1]["context"]
    _panel(panels[0, 0], f"generate(), {tokens:,} tokens:\nms per decode step", step)
    _panel(panels[0, 1], f"generate(), {tokens:,} tokens:\nMiB resident at the peak", peak)
    _panel(panels[1, 0], *_memory(records["memory"]))
    _panel(panels[1, 1], *_step(records["step"]))
    hardware = records["cache"]["hardware"]
    figure.supxlabel(f"{hardware['cpu']}, {hardware['cores']} cores", color=_TEXT, fontsize=8)
    for axes, name in zip(panels[2], ("short", "long"), strict=True):
        rows = [row for row in records["throughput"]["figures"] if row["set"] == name]
        speeds = sorted(((_ENGINES[row["engine"]], row["output tokens/s"]) for row in rows), key=lambda bar: -bar[1])
        _panel(axes, f"throughput, {name} prompts:\noutput tokens/s, more is better", speeds)


def _caches(record: Record) -> tuple[list[Bar], list[Bar]]:
    """Time and memory of the caches of `generate()`, at the last context measured."""
    row = record["figures"][-1]
    names = {
        "dynamic": "DynamicCache",
        "static x2": "StaticCache, twice the length",
        "static": "StaticCache, exact length",
        "virtual": "VirtualCache",
    }
    step, peak = ([(name, row[f"{kind} {unit}"]) for kind, name in names.items()] for unit in ("ms", "MiB"))
    return step, peak


def _memory(record: Record) -> tuple[str, list[Bar]]:
    row = record["figures"][-1]
    length = record["parameters"]["max_model_len"]
    bars = [
        (f"static, {length:,} tokens for each", row["static MiB"]),
        ("virtual", row["virtual MiB"]),
        ("paged", row["paged MiB"]),
        ("dynamic", row["dynamic MiB"]),
    ]
    return f"{row['requests']} requests, {row['mean tokens']:.0f} tokens on average:\nMiB held at the peak", bars


def _step(record: Record) -> tuple[str, list[Bar]]:
    bars = [
        (f"{what}, {row['context']:,} tokens", row[column])
        for row in (record["figures"][0], record["figures"][-1])
        for what, column in (("block table", "block table us"), ("step()", "step us"))
    ]
    return f"before a step of {record['parameters']['requests']} requests:\nmicroseconds", bars


def _panel(axes: Any, title: str, bars: Iterable[Bar]) -> None:
    names, values = zip(*bars, strict=True)
    colors = [_OURS if _is_ours(name) else _OTHERS for name in names]
    drawn = axes.barh(range(len(names)), values, color=colors, height=0.7)
    labels = [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values]
    axes.bar_label(drawn, labels, padding=3, color=_TEXT, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(left=False, labelcolor=_TEXT, labelsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(values))
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_title(title, color=_TEXT, fontsize=10, loc="left")


def _is_ours(name: str) -> bool:
    return name in ("VirtualCache", "virtual", "vattn's engine") or name.startswith("step()")
