"""The progress of prompts, with tokens per second, as vLLM shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from .metrics import Figures

# True for a bar of tqdm's on stderr; or what makes one, given tqdm's keywords.
UseTqdm = bool | Callable[..., Any]
_SECONDS = 0.1  # between two looks at the figures


class Progress:
    """A progress bar of prompts that tells tokens per second while they run, also before the first one has ended.

    Args:
        total: number of prompts.
        figures: running totals of the engine.
        use_tqdm: whether to show it, or what makes the bar.
    """

    def __init__(self, total: int, figures: Figures, use_tqdm: UseTqdm) -> None:
        self._figures = figures
        self._bar: Any = None
        if use_tqdm and total:
            from tqdm import tqdm  # type: ignore[import-untyped]

            make = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make(
                total=total, desc="Processed prompts", unit="req", dynamic_ncols=True, postfix=self._speeds(0, 0, 1)
            )
        self._start = self._told = time.monotonic()
        self._before = figures.prompt_tokens, figures.generation_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def stepped(self, finished: int) -> None:
        """Tells what is new after a step that finished so many prompts."""
        if self._bar is None:
            return
        now = time.monotonic()
        if finished or now - self._told >= _SECONDS:
            self._told = now
            prompt, output = self._before
            figures = self._figures
            self._bar.set_postfix_str(
                self._speeds(
                    figures.prompt_tokens - prompt, figures.generation_tokens - output, max(now - self._start, 1e-9)
                ),
                refresh=not finished,
            )
        if finished:
            self._bar.update(finished)

    @staticmethod
    def _speeds(prompt_tokens: int, output_tokens: int, seconds: float) -> str:
        return f"input: {prompt_tokens / seconds:.1f} tokens/s, output: {output_tokens / seconds:.1f} tokens/s"
