"""What the answers of all endpoints have in common: ids, usage, and the loop of a stream."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ..requests.outputs import CompletionOutput, RequestOutput, merged
from .errors import json_response
from .logprobs import prompt_logprobs
from .protocol import CompletionRequest, GenerateRequest, Sampling
from .service import Run
from .streams import Parts, event, parts

LIGHT = 1000  # values that are written in about a millisecond
LIGHT_TEXTS = 2**17  # characters of texts that are


class Counter:
    """The tokens of one HTTP request, counted as its outputs come."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens, and how many of them were cached
        self._completions: defaultdict[tuple[int, int], int] = defaultdict(int)  # by prompt and choice

    def add(self, number: int, output: RequestOutput) -> None:
        """Take an output of DELTA, or the last one, of the prompt with this number."""
        self._prompts.setdefault(number, (len(output.prompt_token_ids), output.num_cached_tokens))
        for completion in output.outputs:
            self._completions[number, completion.index] += len(completion.token_ids)

    @property
    def usage(self) -> dict[str, Any]:
        """Of all prompts and choices."""
        return _usage(self._prompts.values(), self._completions.values())

    def of_choice(self, number: int, index: int) -> dict[str, Any]:
        """Of a choice, and of the prompt with this number."""
        return _usage([self._prompts[number]], [self._completions[number, index]])


def _usage(prompts: Collection[tuple[int, int]], completions: Iterable[int]) -> dict[str, Any]:
    prompt, completion = sum(tokens for tokens, _ in prompts), sum(completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in prompts)},
    }


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """The `usage` of finished prompts."""
    counter = Counter()
    for number, output in enumerate(outputs):
        counter.add(number, output)
    return counter.usage


def head(kind: str, prefix: str, request: Request, model: str) -> dict[str, Any]:
    """The fields that every answer to a request begins with."""
    request_id = request.scope["request_id"]
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


def ending(completion: CompletionOutput, body: Sampling) -> dict[str, Any]:
    """The fields that every choice ends with."""
    fields: dict[str, Any] = {"finish_reason": completion.finish_reason}
    if completion.finish_reason is not None:
        fields["stop_reason"] = completion.stop_reason
    if body.return_token_ids:
        fields["token_ids"] = completion.token_ids
    return fields


def of_prompt(output: RequestOutput, body: Sampling) -> dict[str, Any]:
    """What was asked for about the prompt."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["prompt_token_ids"] = output.prompt_token_ids
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(
            output.prompt_logprobs, output.prompt_token_ids, body.prompt_logprobs
        )
    return fields


# Chunks of an output of the prompt with this number: one for each of its completions, or one with the texts of all.
Chunks = Callable[[int, RequestOutput], Iterable[dict[str, Any]]]


async def stream(run: Run, body: Sampling, start: dict[str, Any], chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """The events of a stream: what `chunks` makes of each output, and the usage where it was asked for.

    Outputs of `/generate` that wait have one event, whose texts are those so far. What came with an error is written
    before it.
    """
    counter = Counter()
    begun: defaultdict[int, set[int]] = defaultdict(set)  # choices of each prompt
    in_chunks = body.usage_in_chunks
    in_one = isinstance(body, GenerateRequest)  # an event has all choices
    async with aclosing(run.batches()) as batches:
        async for batch in batches:
            if in_one:  # the last event has all the text of those before it
                batch = [(0, merged([output for _, output in batch]))]
            events: list[bytes] = []
            for number, output in batch:
                counter.add(number, output)
                heavy = weight(output, body, begun[number]) > LIGHT
                begun[number].update(completion.index for completion in output.outputs)
                told = output.error is None or any(each.text or each.token_ids for each in output.outputs)
                for place, chunk in enumerate(chunks(number, output) if told else ()):
                    value = {**start, **chunk}
                    if in_chunks:
                        value["usage"] = (
                            counter.usage if in_one else counter.of_choice(number, output.outputs[place].index)
                        )
                    if not heavy and sum(map(len, chunk.get("text", ()))) <= LIGHT_TEXTS:
                        events.append(event(value))
                        continue
                    yield b"".join([*events, b"data: "])
                    events = [b"\n\n"]
                    async for part in parts(value):
                        yield part
            if events:
                yield b"".join(events)
            for _, output in batch:
                run.check(output)
    if body.usage_in_stream:
        yield event({**start, "choices": [], "usage": counter.usage})


def weight(output: RequestOutput, body: Sampling, begun: Collection[int] = ()) -> int:
    """About how many values it takes to write an output as JSON.

    Args:
        begun: choices whose beginning was written, with what there is of the prompt.
    """
    total = 0
    for completion in output.outputs:
        total += 1 + len(completion.token_ids) + sum(map(len, completion.logprobs or ()))
    if beginning := sum(completion.index not in begun for completion in output.outputs):
        total += beginning * sum(len(report or ()) for report in output.prompt_logprobs or ())
        if body.return_token_ids or _echoes(body):
            total += beginning * len(output.prompt_token_ids)
    return total


def _echoes(body: Sampling) -> bool:
    """Whether the texts begin with the prompt."""
    return isinstance(body, GenerateRequest) or (isinstance(body, CompletionRequest) and bool(body.echo))


def answered(value: Mapping[str, Any], weight: int) -> Response:
    """An answer as JSON; one that takes long to write is sent in parts."""
    return json_response(value) if weight <= LIGHT else Parts(parts(value))
