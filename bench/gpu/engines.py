"""The engine over its backends, each with the kernel that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from bench.gpu.caches import BLOCK_SIZE
from bench.gpu.device import best, empty_cache, paged_kernels
from vattn.attention import Attention
from vattn.engine import LLM
from vattn.engine.scheduling.record import StepRecord


def kernels() -> tuple[dict[str, Attention], list[str]]:
    """The kernel of each backend to compare; and the lines for a report's MISSING."""
    scattered, missing = paged_kernels(BLOCK_SIZE)
    found = {"virtual": best(), "static": best()}
    return found | ({"paged": scattered[0]} if scattered else {}), missing


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
