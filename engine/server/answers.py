"""What the answers of all endpoints have in common: ids, usage, and the loop of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from vattn.engine.requests.outputs import CompletionOutput, RequestOutput
from vattn.engine.server.protocol import Sampling
from vattn.engine.server.service import Run
from vattn.engine.server.streams import event


class Counter:
    """The tokens of one HTTP request, counted as its outputs come."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0

    def add(self, number: int, output: RequestOutput) -> None:
        """Take an output of DELTA, or the last one, of the prompt with this number."""
        self._prompts[number] = len(output.prompt_token_ids), output.num_cached_tokens
        self._completion += sum(len(completion.token_ids) for completion in output.outputs)

    @property
    def usage(self) -> dict[str, Any]:
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """The `usage` of finished prompts."""
    counter = Counter()
    for number, output in enumerate(outputs):
        counter.add(number, output)
    return counter.usage


def head(kind: str, prefix: str, request_id: str, model: str) -> dict[str, Any]:
    """The fields that every answer begins with."""
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


def ending(completion: CompletionOutput, body: Sampling) -> dict[str, Any]:
    """The fields that every choice ends with."""
    fields: dict[str, Any] = {"finish_reason": completion.finish_reason}
    if completion.finish_reason is not None:
        fields["stop_reason"] = completion.stop_reason
    if body.return_token_ids:
        fields["token_ids"] = completion.token_ids
    return fields


# Chunks of an output of the prompt with this number: the `choices` of each, and what else it has.
Chunks = Callable[[int, RequestOutput], Sequence[dict[str, Any]]]


async def stream(run: Run, body: Sampling, start: dict[str, Any], chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """The events of a stream: what `chunks` makes of each output, and the usage where it was asked for."""
    counter = Counter()
    in_chunks = body.usage_in_chunks
    async with aclosing(run.batches()) as batches:
        async for batch in batches:
            events = []
            for number, output in batch:
                run.check(output)
                counter.add(number, output)
                for chunk in chunks(number, output):
                    usage = {"usage": counter.usage} if in_chunks else {}
                    events.append(event({**start, **chunk, **usage}))
            if events:
                yield b"".join(events)
    if body.usage_in_stream:
        yield event({**start, "choices": [], "usage": counter.usage})
