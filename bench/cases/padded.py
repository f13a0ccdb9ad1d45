"""The block table of a batch with one long request among many short ones, padded to the longest, beside `step()`.

Reproduces what the paper says of preparing block tables (section 3.3.2): it took 30 % of a decode iteration in an early
vLLM and up to 10 % later, in proportion to the batch times its longest request. 255 requests of 256 tokens and one that
is longer decode together. Before each step, an engine with a block table makes one padded tensor:

    lists   of Python's lists of blocks, padded and made into a tensor, as early versions of vLLM did
    gather  of the rows of a table that is kept, by one gather of the columns in use, as in `step`

vattn's engine calls `step()` instead, which has no table to fill. Then one layer of attention: over contiguous rows,
and over the padded table with the same kernel, which reads only what is used of each row. The blocks of a request
follow each other, which is the table's best case.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import torch

from bench.harness import theme
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import KVConfig
from vattn.attention import Contiguous, attend
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.virtual import VirtualKV
from vattn.packed import KVShape

ABOUT = "the padded block table of one long request among many short ones, beside step()"
QUESTION = "What does one long request cost a batch of short ones?"

_REQUESTS, _SHORT = 256, 256
_LONG = (256, 4096, 16_384, 65_536, 131_072)
_BLOCK, _PAGE = 16, 2**16
_KV_HEADS, _GROUP, _DIM = 1, 4, 32
_WARMUP = 3


def run(quick: bool) -> Report:
    requests, lengths, rounds = (16, (64, 1024), 5) if quick else (_REQUESTS, _LONG, 40)
    figures = [_row(requests, min(_SHORT, lengths[0]), long, rounds) for long in lengths]
    last = figures[-1]
    return Report(
        parameters={
            "requests": requests,
            "short": min(_SHORT, lengths[0]),
            "block_size": _BLOCK,
            "attention": f"{_KV_HEADS * _GROUP} heads on {_KV_HEADS} of {_DIM}, bfloat16",
            "threads": torch.get_num_threads(),
            "calls": rounds,
        },
        figures=figures,
        goals=[
            Goal(
                f"step() over filling the table, one of {last['longest']} tokens",
                float(last["step us"]) / float(last["gather us"]),
                "<=",
                0.2,
            ),
        ],
    )


def _row(requests: int, short: int, long: int, rounds: int) -> Row:
    calls = rounds + _WARMUP
    tokens = [long, *[short] * (requests - 1)]
    dtype = torch.bfloat16
    shape = KVShape.uniform(1, _KV_HEADS, _DIM, _DIM)
    with ExitStack() as stack:
        config = KVConfig(
            groups=shape.groups(long),
            dtype=dtype,
            max_batch_size=requests,
            max_context_len=long,
            memory_budget="1GiB",
            page_size=_PAGE,
            layout="layer",
        )
        virtual = stack.enter_context(closing(VirtualKV(config)))
        spec = KVSpec(shape, max_num_seqs=requests, max_model_len=long, dtype=dtype, block_size=_BLOCK)
        paged = stack.enter_context(closing(PagedKV(spec, num_blocks=sum(-(-n // _BLOCK) for n in tokens))))
        slots = [virtual.allocate(n) for n in tokens]
        numbers = [paged.allocate(n) for n in tokens]
        paged.prepare(dict(zip(numbers, tokens, strict=True)))
        lists = [paged.block_lists()[number] for number in numbers]
        table = torch.zeros(requests, paged.max_blocks, dtype=torch.int32)
        # The last step has all tokens, so that none goes beyond the page in which it began.
        steps = iter([{slot: n - left for slot, n in zip(slots, tokens, strict=True)} for left in range(calls, -1, -1)])
        virtual.prepare(next(steps))
        rows, blocks = virtual.stored(0), paged.stored(0)
        assert isinstance(rows, Contiguous)
        query = torch.randn(requests, _KV_HEADS * _GROUP, _DIM, dtype=dtype)
        lengths = torch.tensor(tokens, dtype=torch.int32)
        places = torch.tensor(slots, dtype=torch.int32)
        filled = paged.fill_block_tables(numbers, table)
        seconds = interleave(
            {
                "step": lambda: virtual.prepare(next(steps)),
                "lists": lambda: _pad(lists),
                "gather": lambda: paged.fill_block_tables(numbers, table),
                "contiguous": lambda: attend(query, rows.key, rows.value, lengths, slots=places),
                "padded": lambda: attend(query, blocks.key, blocks.value, lengths, block_table=filled),
            },
            rounds,
            warmup=_WARMUP,
        )
    used = sum(map(len, lists))
    us = {side: 1e6 * median(taken) for side, taken in seconds.items()}
    return {
        "longest": long,
        "entries": filled.numel(),
        "used %": 100 * used / filled.numel(),
        "step us": us["step"],
        "gather us": us["gather"],
        "lists us": us["lists"],
        "attention us": us["contiguous"],
        "attention, table us": us["padded"],
        "gather over attention": us["gather"] / us["padded"],
    }


def _pad(lists: list[list[int]]) -> torch.Tensor:
    """The lists in one tensor."""
    longest = max(map(len, lists))
    return torch.tensor([blocks + [0] * (longest - len(blocks)) for blocks in lists], dtype=torch.int32)


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            f"To {does} a padded block table takes {{}} times as long as `step()`",
            record,
            columns(record, f"{side} us", "step us"),
        )
        for side, does in (("gather", "gather"), ("lists", "make lists into"))
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    longest = [row["longest"] for row in rows]
    sides = {
        "lists": ("another", "block table, from lists"),
        "gather": ("paged", "block table, gathered"),
        "step": ("virtual", "vattn's step()"),
    }
    for side, (name, label) in sides.items():
        axes.plot(longest, [row[f"{side} us"] for row in rows], **theme.style(name), label=label)
    last = rows[-1]
    axes.set_title(
        f"One request of {last['longest']:,} tokens among {record['parameters']['requests'] - 1} of "
        f"{record['parameters']['short']}: filling the table takes {last['gather us']:,.0f} us, step() "
        f"{last['step us']:,.0f}"
    )
    axes.set(xlabel="tokens of the longest request", ylabel="microseconds per step", yscale="log")
    theme.doublings(axes, longest)
