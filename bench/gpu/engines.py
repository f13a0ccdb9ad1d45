"""The engine over its backends, each with the kernel that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from bench.gpu.caches import BLOCK_SIZE
from bench.gpu.device import empty_cache
from bench.gpu.sides import sides
from vattn.attention import Attention
from vattn.engine import LLM
from vattn.engine.scheduling.record import StepRecord


def kernels() -> tuple[dict[str, Attention], list[str]]:
    """The first kernel of each backend that can be used; and, for backends that have none, a report's MISSING.

    flash-attn 3 comes before the others if there is one: it is the fastest for all of them.
    """
    compared = sides(["flash_attn_3"])
    found: dict[str, Attention] = {}
    for side in compared:
        if not side.refusal:
            found.setdefault(side.cache, side.kernel)
    return found, [str(side) for side in compared if side.cache not in found]


@contextmanager
def engine(
    model: PreTrainedModel,
    kv: str,
    attention: Attention,
    *,
    prefixes: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
    **options: Any,
) -> Iterator[LLM]:
    """An engine without a tokenizer; afterwards its memory is the device's again."""
    with LLM(
        model,
        kv=kv,
        attention=attention,
        block_size=BLOCK_SIZE,
        skip_tokenizer_init=True,
        enable_prefix_caching=prefixes,
        on_step=on_step,
        **options,
    ) as llm:
        yield llm
    empty_cache()
