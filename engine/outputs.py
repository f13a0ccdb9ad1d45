"""What a caller gets back, shaped as in vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from engine.request import Request, State

Detokenize = Callable[[list[int]], str]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion.

    Attributes:
        token_ids: output tokens so far, a token that stopped the request included.
        finish_reason: "stop", "length", "abort" or "error"; None while the request runs.
        stop_reason: the token that stopped it, where it was one.
    """

    index: int
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | None
    detokenize: Detokenize | None = field(default=None, repr=False, compare=False)

    @cached_property
    def text(self) -> str:
        """The tokens as text, special tokens left out; empty without a tokenizer. Decoded when first read."""
        return self.detokenize(self.token_ids) if self.detokenize else ""


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in `time.monotonic()` seconds; None for what has not happened yet."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """A request as it stood when this was made; later steps do not change it.

    Attributes:
        prompt: the text, where the prompt was one.
        outputs: one completion.
        error: what went wrong, where the finish reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: BaseException | None = None

    @classmethod
    def of(cls, request: Request, detokenize: Detokenize | None = None) -> RequestOutput:
        completion = CompletionOutput(
            index=0,
            token_ids=list(request.output_token_ids),
            finish_reason=request.finish_reason and request.finish_reason.value,
            stop_reason=request.stop_reason,
            detokenize=detokenize,
        )
        metrics = RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            finished_time=request.finished_time,
            num_preemptions=request.num_preemptions,
        )
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=request.state is State.DONE,
            metrics=metrics,
            error=request.error,
        )
