"""One kernel over contiguous rows and over a block table, prefill and decode: time, and instructions per token.

Reproduces "paged against contiguous prefill kernels" (Fig. 2/4), on a CPU, beside "paged decode kernel" (Fig. 3) and
the count of instructions that goes with both (7 to 13 % more). vattn's kernel reads plain tensors, contiguous ones, and
blocks of 16 tokens that follow each other (`neighbours`) or lie anywhere (`scattered`). One layer of Qwen2-0.5B's
heads, 14 on two KV heads of 64, in bfloat16. A prefill is one request's last chunk of up to 2,048 tokens; a decode is
one token for each of eight requests. `torch` is `scaled_dot_product_attention` over the contiguous rows: its causal
kernel for a prompt's only chunk, with a mask for the last of several.

Instructions are those of one thread in user space, by `perf_event_open`. Where there is no counter, as in most virtual
machines, the column is empty, and the parameters say why.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import theme
from bench.harness.instructions import CannotCount, Counter
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import cpu
from vattn.attention import attend

ABOUT = "one kernel over contiguous rows and over a block table, prefill and decode: time, instructions per token"
QUESTION = "What does a block table cost the same kernel?"

_CONTEXTS = (256, 1024, 4096, 16_384)
_CHUNK = 2048
_BLOCK = 16
_ROUNDS = {"prefill": 5, "decode": 15}
_KV_HEADS, _GROUP, _DIM = 2, 7, 64
_DECODES = 8
_BLOCKED = ("neighbours", "scattered")


def run(quick: bool) -> Report:
    contexts, rounds = ((64, 256), {"prefill": 3, "decode": 3}) if quick else (_CONTEXTS, _ROUNDS)
    threads = torch.get_num_threads()
    refusal = ""
    figures: list[Row] = []
    for kind in _ROUNDS:
        for context in contexts:
            actions = _actions(kind, context)
            seconds = interleave(actions, rounds[kind], warmup=1)
            counts: dict[str, int] = {}
            torch.set_num_threads(1)
            try:
                counts = _count({side: actions[side] for side in ("contiguous", "scattered")})
            except CannotCount as error:
                refusal = str(error)
            finally:
                torch.set_num_threads(threads)
            figures.append(_row(kind, context, seconds, counts))
    return Report(
        parameters={
            "heads": f"{_KV_HEADS * _GROUP} on {_KV_HEADS} of {_DIM}",
            "dtype": "bfloat16",
            "threads": threads,
            "kernels": cpu.chosen().name,
            "block_size": _BLOCK,
            "chunk": _CHUNK,
            "requests of a decode": _DECODES,
            "calls": rounds,
            **({"instructions": f"not counted: {refusal}"} if refusal else {}),
        },
        figures=figures,
        goals=[
            Goal(
                f"{kind}, scattered over contiguous (least)",
                min(float(row["scattered over contiguous"]) for row in figures if row["kind"] == kind),
                ">=",
                1.0,
            )
            for kind in _ROUNDS
        ],
    )


def _count(actions: dict[str, Callable[[], object]]) -> dict[str, int]:
    counter = Counter()
    try:
        return {side: min(counter.count(action) for _ in range(3)) for side, action in actions.items()}
    finally:
        counter.close()


def _actions(kind: str, context: int) -> dict[str, Callable[[], object]]:
    """A call of each side, over the same keys and values."""
    requests, new = (1, min(context, _CHUNK)) if kind == "prefill" else (_DECODES, 1)
    blocks = context // _BLOCK
    dtype = torch.bfloat16
    keys, values = (torch.randn(requests, _KV_HEADS, context, _DIM, dtype=dtype) for _ in range(2))
    query = torch.randn(requests * new, _KV_HEADS * _GROUP, _DIM, dtype=dtype)
    lengths = torch.full((requests,), context, dtype=torch.int32)
    starts = torch.arange(0, requests * new + 1, new, dtype=torch.int32)
    key, value = keys.transpose(1, 2), values.transpose(1, 2)
    numbers = torch.arange(requests * blocks, dtype=torch.int32)
    tables = {
        "neighbours": numbers.view(requests, blocks),
        "scattered": numbers[torch.randperm(len(numbers))].view(requests, blocks),
    }

    def blocked(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The rows in blocks as in the paged backend: the tokens of a head are neighbours."""
        pool = torch.empty(_KV_HEADS, requests * blocks, _BLOCK, _DIM, dtype=dtype)
        pool[:, table.flatten().long()] = rows.transpose(0, 1).reshape(_KV_HEADS, requests * blocks, _BLOCK, _DIM)
        return pool.permute(1, 2, 0, 3)

    def over(table: torch.Tensor) -> Callable[[], object]:
        key_blocks, value_blocks = blocked(keys, table), blocked(values, table)
        return lambda: attend(query, key_blocks, value_blocks, lengths, starts=starts, block_table=table)

    return {
        "contiguous": lambda: attend(query, key, value, lengths, starts=starts),
        **{side: over(table) for side, table in tables.items()},
        "torch": _torch(query, keys, values, new),
    }


def _torch(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, new: int) -> Callable[[], object]:
    requests, context = len(keys), keys.shape[2]
    if new == 1:  # the query heads of a KV head as rows, request by request: the fastest way to call it
        folded = query.view(requests, 1, _KV_HEADS, _GROUP, _DIM).unbind()
        rows = [(folded[i], keys[i : i + 1], values[i : i + 1]) for i in range(requests)]
        return lambda: [scaled_dot_product_attention(*each) for each in rows]
    heads = query.view(1, new, _KV_HEADS * _GROUP, _DIM).transpose(1, 2)
    mask = None if new == context else torch.ones(new, context, dtype=torch.bool).tril(context - new)

    def call() -> torch.Tensor:
        return scaled_dot_product_attention(
            heads, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    return call


def _row(kind: str, context: int, seconds: dict[str, list[float]], counts: dict[str, int]) -> Row:
    tokens = min(context, _CHUNK) if kind == "prefill" else _DECODES

    def over(side: str) -> float:
        return median(a / b for a, b in zip(seconds[side], seconds["contiguous"], strict=True))

    return {
        "kind": kind,
        "context": context,
        "new tokens": tokens,
        **{f"{side} us": 1e6 * median(taken) for side, taken in seconds.items()},
        **{f"{side} over contiguous": over(side) for side in (*_BLOCKED, "torch")},
        **{
            f"{side} instructions/token": counts[side] / tokens if counts else "-"
            for side in ("contiguous", "scattered")
        },
    }


def _of(kind: str) -> Callable[[Any], bool]:
    return lambda row: bool(row["kind"] == kind)


def compare(record: Record) -> list[Comparison]:
    found = [
        Comparison(
            f"A {kind} over scattered blocks takes {{}} times as long as over contiguous rows, with the same kernel",
            record,
            columns(record, "scattered over contiguous", where=_of(kind)),
        )
        for kind in ("prefill", "decode")
    ]
    names = ("scattered instructions/token", "contiguous instructions/token")
    counted = Comparison("It takes {} times as many instructions", record, columns(record, *names))
    return found + [counted] * bool(counted.pairs)


def draw(axes: Any, record: Record) -> None:
    figures = record["figures"]
    contexts = sorted({row["context"] for row in figures})
    lines = {
        ("prefill", "scattered"): ("paged", "prefill, scattered blocks"),
        ("prefill", "neighbours"): ("other", "prefill, neighbours"),
        ("decode", "scattered"): ("another", "decode, scattered blocks"),
        ("decode", "neighbours"): ("dynamic", "decode, neighbours"),
    }
    for (kind, side), (name, label) in lines.items():
        ratios = [row[f"{side} over contiguous"] for row in figures if row["kind"] == kind]
        axes.plot(contexts, ratios, **theme.style(name), label=label)
    theme.reference(axes, "contiguous rows")
    most = {
        kind: max(row["scattered over contiguous"] for row in figures if row["kind"] == kind)
        for kind in ("prefill", "decode")
    }
    axes.set_title(
        f"The same kernel over scattered blocks: a prefill takes up to {theme.more_time(most['prefill'])}, a decode up "
        f"to {theme.more_time(most['decode'])}"
    )
    axes.set(xlabel="tokens of a request", ylabel="time, over contiguous rows'", ylim=(0, None))
    theme.doublings(axes, contexts)
