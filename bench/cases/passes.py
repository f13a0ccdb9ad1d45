"""Forward passes of `generate()` besides the steps of one sequence, over `DynamicCache` and `VirtualCache`.

Prompts; the next turn of a chat and drafts that are verified, after tokens that are in the cache; and batches of which
one sequence is shorter, padded on the left. The caches take turns, and after each pass its tokens are taken back, so
that all passes find the same. A prompt's memory is that of the pass before.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import vattn
from bench.harness import theme
from bench.harness.models import CACHE, QWEN2, TINY
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave

ABOUT = "prompts, later turns, drafts and padded batches over transformers' caches: dynamic and virtual"
QUESTION = "How long do prompts and chats take in `generate()`?"

_WARMUP = 1


class _Pass(NamedTuple):
    name: str
    batch: int
    cached: int
    new: int
    padding: int = 0  # of the first sequence

    def shortened(self) -> _Pass:
        return self._replace(cached=min(self.cached, 64), new=min(self.new, 32), padding=min(self.padding, 8))


_PASSES = (
    _Pass("a prompt", 1, 0, 128),
    _Pass("a prompt", 1, 0, 512),
    _Pass("a prompt", 1, 0, 2048),
    _Pass("the next turn of a chat", 1, 4096, 256),
    _Pass("drafts", 1, 4096, 8),
    _Pass("padded prompts", 4, 0, 512, 128),
    _Pass("a step of a padded batch", 8, 2048, 1, 512),
)


def run(quick: bool) -> Report:
    passes, rounds, sizes = list(_PASSES), 5, QWEN2
    if quick:
        passes = [each.shortened() for each in _PASSES]
        rounds, sizes = 2, QWEN2 | TINY
    figures = [_row(_model(sizes, dtype), each, rounds) for dtype in (torch.float32, torch.bfloat16) for each in passes]
    worst = min(figures, key=lambda row: float(row["dynamic / virtual"]))
    return Report(
        parameters={"model": sizes, "threads": torch.get_num_threads(), "rounds": rounds},
        figures=figures,
        goals=[
            Goal(
                f"dynamic over virtual (least, {worst['pass']}, {worst['new']} tokens, {worst['dtype']})",
                float(worst["dynamic / virtual"]),
                ">=",
                0.98,
            )
        ],
    )


def _row(model: PreTrainedModel, which: _Pass, rounds: int) -> Row:
    with vattn.VirtualCache(model, max_context_len=model.config.max_position_embeddings) as virtual:
        caches = {"dynamic": DynamicCache(config=model.config), "virtual": virtual}
        passes = {kind: _begin(model, cache, which) for kind, cache in caches.items()}
        times = interleave(passes, rounds, warmup=_WARMUP)
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "pass": which.name,
        "sequences": which.batch,
        "cached": which.cached,
        "new": which.new,
        **{f"{kind} ms": 1e3 * median(seconds) for kind, seconds in times.items()},
        "dynamic / virtual": median(a / b for a, b in zip(times["dynamic"], times["virtual"], strict=True)),
    }


@torch.no_grad()
def _begin(model: PreTrainedModel, cache: Cache, which: _Pass) -> Callable[[], None]:
    """Computes what is cached before the pass, and returns the pass."""
    mask = torch.ones(which.batch, which.cached + which.new, dtype=torch.int64)
    mask[0, : which.padding] = 0
    ids = torch.full((which.batch, which.cached + which.new), 7)
    options: dict[str, Any] = {CACHE: cache, "logits_to_keep": 1}
    if which.cached:
        model(ids[:, : which.cached], attention_mask=mask[:, : which.cached], **options)

    @torch.no_grad()
    def forward() -> None:
        model(ids[:, which.cached :], attention_mask=mask, **options)
        cache.crop(-which.new)

    return forward


def _model(sizes: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**sizes))
    torch.nn.Module.to(model, dtype)
    model.train(False)
    return model


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "A prompt, a later turn, drafts or a padded batch take {} times as long over `DynamicCache` as over "
            "`VirtualCache`",
            record,
            columns(record, "dynamic ms", "virtual ms"),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    rows = [row for row in record["figures"] if row["dtype"] == "bfloat16"]
    labels = [_label(row) for row in rows]
    theme.bars(axes, {label: row["dynamic / virtual"] for label, row in zip(labels, rows, strict=True)}, [])
    ratios = [row["dynamic / virtual"] for row in rows]
    axes.set_title(
        f"Forward passes of generate() take {min(ratios):.2f} to {max(ratios):.2f} times as long over DynamicCache as "
        "over VirtualCache"
    )
    axes.set_xlabel("time over DynamicCache / time over VirtualCache, bfloat16")


def _label(row: dict[str, Any]) -> str:
    sequences = f"{row['sequences']} x " if row["sequences"] > 1 else ""
    return f"{row['pass']}: {sequences}{row['new']}" + (f" after {row['cached']:,}" if row["cached"] else "")
