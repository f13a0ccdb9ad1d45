"""The figures of the interactive panel and of the tables of block sizes, all from `vattn.plan`.

The panel multiplies and divides what is exported here; how tokens fill pages is computed nowhere but in the library.
"""

from __future__ import annotations

import functools
from typing import Any

from vattn.model_shapes import find_shape
from vattn.plan import PAGE_SIZES, Option, plan

MODELS = ("Yi-6B", "Llama-3-8B", "Yi-34B", "Llama-3-70B", "Gemma-2-9B", "DeepSeek-V3")
GPUS = (1, 2, 4)
TOKENS = tuple(2**power for power in range(8, 18))
BLOCK_SIZES = (1, 8, 16, 32, 128)
TABLE_MODELS = ("Yi-6B", "Llama-3-8B", "Yi-34B")
TABLE_GPUS = (1, 2)
FIELDS = ("held_bytes", "mean_waste", "table_bytes", "map_calls_per_token", "address_bytes")

_SAMPLES = 61  # lengths of a load
_MEMORY = 2**40  # no option is limited by it


def load(tokens: int) -> list[int]:
    """Lengths of requests with `tokens` tokens on average: evenly from half to one and a half times as many."""
    return [tokens // 2 + number * tokens // (_SAMPLES - 1) for number in range(_SAMPLES)]


@functools.cache
def options(model: str, gpus: int, tokens: int) -> tuple[Option, ...]:
    """What a single request of about `tokens` tokens takes on one of `gpus` GPUs, by option."""
    shape = find_shape(model, tensor_parallel=gpus)
    lengths = load(tokens)
    found = plan(
        shape.groups,
        memory=_MEMORY,
        max_context_len=max(lengths),
        max_batch_size=1,
        lengths=lengths,
        block_sizes=BLOCK_SIZES,
    )
    return tuple(option for option in found.options if option.kind == "paged" or option.page_size in PAGE_SIZES)


def grid() -> dict[str, Any]:
    """What the panel shows, for a single request: by model, GPUs and tokens, a row of `FIELDS` per option."""
    first = options(MODELS[0], GPUS[0], TOKENS[0])
    return {
        "models": MODELS,
        "gpus": GPUS,
        "tokens": TOKENS,
        "fields": FIELDS,
        "options": [
            {
                "kind": option.kind,
                "layout": option.layout,
                "page": option.page_size if option.kind == "virtual" else None,
                "block": option.block_tokens if option.kind == "paged" else None,
                "offered": option.offered,
            }
            for option in first
        ],
        "values": [
            [
                [
                    [[round(getattr(option, field), 4) for field in FIELDS] for option in options(model, gpus, tokens)]
                    for tokens in TOKENS
                ]
                for gpus in GPUS
            ]
            for model in MODELS
        ],
    }
