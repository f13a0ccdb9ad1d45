"""Bytes that a request holds in models with sliding windows, by context, beside a cache that keeps every token.

The shapes are those of published models whose layers differ, in bf16. The bytes are those of pages, by the arithmetic
of the layout; a request that is really grown token by token has to match it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench.harness import theme
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from vattn import KVCache, KVConfig
from vattn.config import build_layout
from vattn.groups import TensorGroup
from vattn.units import format_bytes

ABOUT = "bytes per request against context where layers have sliding windows"
QUESTION = "What do sliding windows save?"

_CONTEXTS = (1_000, 5_000, 20_000, 65_000, 131_000)
_PAGE_SIZE = 64 << 10
_MEASURED = 10_000  # tokens of the request that is really grown


@dataclass(frozen=True)
class Model:
    """Layers by their windows: every `period`-th layer attends to everything, the others to `window` tokens."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int
    period: int | None  # None: every layer has the window

    @property
    def full_share(self) -> float:
        return sum(len(group.indices) for group in self.groups if group.sliding_window is None) / self.num_layers

    @property
    def groups(self) -> list[TensorGroup]:
        every = range(self.num_layers)
        full = [i for i in every if self.period and i % self.period == self.period - 1]
        local = [i for i in every if i not in full]
        return [
            TensorGroup(layers=layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, sliding_window=window)
            for layers, window in ((full, None), (local, self.window))
            if layers
        ]


_MODELS = (
    Model("GPT-OSS-20B", 24, 8, 64, window=128, period=2),
    Model("Gemma-3-4B", 34, 4, 256, window=1024, period=6),
    Model("Gemma-2-9B", 42, 8, 256, window=4096, period=2),
    Model("Mistral-7B-v0.1", 32, 8, 128, window=4096, period=None),
)


def run(quick: bool) -> Report:
    models, contexts = (_MODELS[:1], _CONTEXTS[:2]) if quick else (_MODELS, _CONTEXTS)
    figures: list[Row] = []
    ratios = {}
    for model in models:
        config = _config(model, contexts[-1])
        uniform = build_layout(_uniform(config), "layer", _PAGE_SIZE)
        groups = build_layout(config, "layer", _PAGE_SIZE)
        for tokens in contexts:
            everything = uniform.pages(tokens) * _PAGE_SIZE
            windows = groups.pages(tokens, tokens - 1) * _PAGE_SIZE
            ideal = sum((tokens - band.first_live(tokens, tokens - 1)) * band.token_bytes for band in groups.bands)
            ratios[model.name, tokens] = windows / everything
            figures.append(
                {
                    "model": model.name,
                    "tokens": tokens,
                    "uniform MiB": everything / 2**20,
                    "groups MiB": windows / 2**20,
                    "seen tokens MiB": ideal / 2**20,
                    "groups over uniform": windows / everything,
                    "over what is seen": windows / ideal,
                }
            )
    measured, expected, bound = _grow(models[0], contexts[-1] if quick else _MEASURED)
    longest = contexts[-1]
    return Report(
        parameters={
            "dtype": "bfloat16",
            "layout": "layer/HND",
            "page": format_bytes(_PAGE_SIZE),
            "measured": f"{models[0].name} grown to {contexts[-1] if quick else _MEASURED} tokens",
            "measured MiB": round(measured / 2**20, 2),
        },
        figures=figures,
        goals=[
            Goal("bytes mapped for a request that is really grown over the arithmetic", measured / expected, "==", 1),
            Goal("most bytes of its windowed layers over the window's blocks and one more", bound, "<=", 1),
            *(
                Goal(
                    f"groups over uniform at {longest} tokens, {model.name} (the share of full layers, and 5 %)",
                    ratios[model.name, longest],
                    "<=",
                    model.full_share + 0.05,
                )
                for model in models
            ),
        ],
        timed=False,
    )


def _config(model: Model, context: int) -> KVConfig:
    return KVConfig(
        groups=model.groups,
        dtype="bfloat16",
        max_batch_size=1,
        max_context_len=context,
        memory_budget="4GiB",
        page_size=_PAGE_SIZE,
        layout="layer",
        eager_pages=0,
        overlap=False,
    )


def _uniform(config: KVConfig) -> KVConfig:
    """The same cache without windows."""
    return replace(config, groups=[replace(group, sliding_window=None) for group in config.tensor_groups])


def _grow(model: Model, tokens: int) -> tuple[int, int, float]:
    """Bytes that a request grown to `tokens` holds, and the bytes expected by the arithmetic; and the most that its
    windowed layers ever held, relative to the blocks of the window and one more.
    """
    with KVCache(_config(model, tokens)) as cache:
        layout = cache.layout
        full, local = sorted(layout.bands, key=lambda band: band.window or 0)
        assert local.window is not None
        bound = local.pages(-(-local.window // local.block_tokens) * local.block_tokens + local.block_tokens)
        reqid = cache.alloc_reqid()
        most = 0
        for length in range(1, tokens + 1):
            cache.step({reqid: length})
            if length % 64 == 1:
                most = max(most, cache.stats().owned_pages - full.pages(length))
        held = layout.pages(tokens, tokens - 1) * layout.page_size
        return cache.stats().owned_bytes, held, most / bound


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "A cache that keeps every token holds {} times the memory of one whose windows give it back",
            record,
            columns(record, "uniform MiB", "groups MiB"),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    tokens = max(row["tokens"] for row in record["figures"])
    rows = [row for row in record["figures"] if row["tokens"] == tokens]
    for shift, column, name, label in (
        (-0.2, "uniform MiB", "static", "every token in every layer"),
        (0.2, "groups MiB", "virtual", "behind a window, pages leave"),
    ):
        sizes = [row[column] / 1024 for row in rows]
        places = [place + shift for place in range(len(rows))]
        drawn = axes.barh(places, sizes, height=0.38, color=theme.color(name), label=label)
        axes.bar_label(drawn, [theme.number(size) for size in sizes], padding=4)
    shares = [100 * row["groups MiB"] / row["uniform MiB"] for row in rows]
    axes.set_yticks(range(len(rows)), [row["model"] for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.14)
    axes.set_title(
        f"Giving back what lies behind a sliding window leaves {min(shares):.0f} to {max(shares):.0f} % of the memory"
    )
    axes.set(xlabel=f"GiB that one request of {tokens:,} tokens holds")
