"""Outputs for callers, shaped as in vLLM, and the groups of requests that they are made from."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .logprobs import Logprob
from .request import Request, State
from .sampling import RequestOutputKind


@dataclass(frozen=True)
class CompletionOutput:
    """One completion.

    Of an unfinished request, text that may be part of a stop string or of an unfinished character is not there yet.

    Attributes:
        text: the tokens as text, up to a stop string, without the token that stopped it, and without a character that
            they leave unfinished; empty without a tokenizer. What `include_stop_str_in_output` and
            `skip_special_tokens` say holds for it.
        token_ids: output tokens, a token that stopped the request included.
        cumulative_logprob: sum of the tokens' log probabilities so far; None unless `logprobs` was asked for.
        logprobs: for each token, token id to `Logprob`: its own first, then the most probable ones; None as above.
        finish_reason: "stop", "length", "abort" or "error"; None while the request runs.
        stop_reason: the token or the stop string that stopped it; None for the end-of-sequence token.
        lora_request: None: adapters are not served.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    lora_request: None = None

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in `time.monotonic()` seconds; None for what has not happened yet.

    Of several completions the first that was scheduled and the first token count, and the last end.
    """

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
    """A snapshot of a request; later steps do not change it.

    Attributes:
        prompt: the prompt's text, if it was given as text.
        prompt_logprobs: for each prompt token, as `CompletionOutput.logprobs`, None for the first; None unless
            `prompt_logprobs` was asked for and the whole prompt has been computed. Every DELTA output has all of them.
        outputs: `n` completions; of a DELTA output, only those with news, and of them only the news.
        error: the error behind a finish reason "error".
        num_cached_tokens: prompt tokens that were in the prefix cache.
        lora_request: None: adapters are not served.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: BaseException | None = None
    num_cached_tokens: int = 0
    lora_request: None = None


# In place of reports that were in an output; they take more memory than all else of a request.
_TOLD: dict[int, Logprob] = {}


class RequestGroup:
    """The requests that complete one prompt, one for each of `n` completions.

    Args:
        requests: in order of their `index`.
        kind: what the outputs of unfinished requests hold.
    """

    def __init__(self, request_id: str, requests: Sequence[Request], kind: RequestOutputKind) -> None:
        self.request_id = request_id
        self.requests = requests
        self.kind = kind
        # DELTA: of each completion the tokens that were in an output, whether its end was, and the text that was not.
        self._told = [0] * len(requests)
        self._ended = [False] * len(requests)
        self._texts = [""] * len(requests)

    def unfinished(self) -> list[Request]:
        return [request for request in self.requests if request.state is not State.DONE]

    def falls_with(self, request: Request) -> list[Request]:
        """The requests that an error in `request` ends."""
        return [request]

    def output(self) -> RequestOutput | None:
        """The current output; None if the output kind calls for none yet.

        News count as told when this returns: an interrupt before leaves them for the next call.
        """
        finished = not self.unfinished()
        if self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        if self.kind is RequestOutputKind.DELTA:
            completions = self._news()
            if not completions and not finished:
                return None
        else:
            completions = [_completion(request, 0, request.text) for request in self.requests]
        told = [len(request.output_token_ids) for request in self.requests]
        ended = [request.state is State.DONE for request in self.requests]
        texts = [""] * len(self.requests)
        first = self.requests[0]
        scored = first.prompt_logprobs
        output = RequestOutput(
            request_id=self.request_id,
            prompt=first.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=scored if scored is not None and len(scored) == len(first.prompt_token_ids) else None,
            outputs=completions,
            finished=finished,
            metrics=self._metrics(finished),
            num_cached_tokens=first.num_cached_tokens,
            error=next((request.error for request in self.requests if request.error is not None), None),
        )
        self._told, self._ended, self._texts = told, ended, texts  # with no call after it
        return output

    @functools.cached_property
    def _prompt_token_ids(self) -> list[int]:
        """The callers', who may change it; the requests compute from theirs."""
        return self.requests[0].prompt_token_ids.copy()

    def _news(self) -> list[CompletionOutput]:
        completions = []
        for row, request in enumerate(self.requests):
            start = self._told[row]
            if len(request.output_token_ids) > start or (request.state is State.DONE) > self._ended[row]:
                if request.detokenizer is not None:
                    self._texts[row] += request.detokenizer.take()
                completions.append(_completion(request, start, self._texts[row]))
        return completions

    def forget_told(self) -> None:
        """Drop the reports that were in an output, if no other output will have them."""
        if self.kind is not RequestOutputKind.DELTA:
            return
        for request, told in zip(self.requests, self._told, strict=True):
            if request.logprobs is not None:
                first = next((place for place in range(told, 0, -1) if request.logprobs[place - 1] is _TOLD), 0)
                request.logprobs[first:told] = [_TOLD] * (told - first)

    def _metrics(self, finished: bool) -> RequestMetrics:
        if len(self.requests) == 1:  # nearly always, and for every token
            request = self.requests[0]
            return RequestMetrics(
                request.arrival_time,
                request.first_scheduled_time,
                request.first_token_time,
                request.finished_time if finished else None,
                request.num_preemptions,
            )

        def times(name: str) -> list[float]:
            return [time for request in self.requests if (time := getattr(request, name)) is not None]

        return RequestMetrics(
            arrival_time=self.requests[0].arrival_time,
            first_scheduled_time=min(times("first_scheduled_time"), default=None),
            first_token_time=min(times("first_token_time"), default=None),
            finished_time=max(times("finished_time")) if finished else None,
            num_preemptions=sum(request.num_preemptions for request in self.requests),
        )


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Outputs of DELTA, one after another, as one."""
    completions: dict[int, list[CompletionOutput]] = {}
    for completion in (each for output in outputs for each in output.outputs):
        completions.setdefault(completion.index, []).append(completion)
    return replace(outputs[-1], outputs=[_joined(completions[index]) for index in sorted(completions)])


def _joined(news: Sequence[CompletionOutput]) -> CompletionOutput:
    logprobs = None
    if news[-1].logprobs is not None:
        logprobs = [report for each in news for report in each.logprobs or ()]
    return replace(
        news[-1],
        text="".join(each.text for each in news),
        token_ids=[token for each in news for token in each.token_ids],
        logprobs=logprobs,
    )


def _completion(request: Request, start: int, text: str) -> CompletionOutput:
    """The completion from its output token `start` on."""
    return CompletionOutput(
        index=request.index,
        text=text,
        token_ids=request.output_token_ids[start:],
        cumulative_logprob=None if request.logprobs is None else request.cumulative_logprob,
        logprobs=None if request.logprobs is None else request.logprobs[start:],
        finish_reason=request.finish_reason and request.finish_reason.value,
        stop_reason=request.stop_reason,
    )
