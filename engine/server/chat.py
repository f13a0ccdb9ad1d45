"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..requests.outputs import CompletionOutput, RequestOutput
from ..requests.prompts import TokenizedPrompt
from ..requests.sampling import SamplingParams
from ..requests.text import TokenText
from .answers import answered, ending, head, of_prompt, stream, usage_of, weight
from .bodies import described
from .errors import bad
from .logprobs import chat_logprobs
from .params import sampling_params
from .protocol import ChatRequest, ChatResponse
from .service import Service
from .streams import EventStream
from .workers import Check


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatResponse, openapi_extra=described(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation. With `stream`, as server-sent events."""

        def use(body: ChatRequest, check: Check) -> tuple[ChatRequest, SamplingParams, list[TokenizedPrompt]]:
            service.check_model(body.model)
            if body.top_logprobs and not body.logprobs:
                raise bad("top_logprobs needs logprobs; set it to true", "top_logprobs")
            max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            params = sampling_params(
                body, service.sampling_defaults, max_tokens=max_tokens, logprobs=logprobs, echo=False
            )
            service.check_size(1, params)
            prompts = [service.prompts.read_chat(body, max_tokens, check)]
            if max_tokens is None:
                params = service.shortened(prompts[0], params)
            service.check_logprobs(prompts, params)
            return body, params, prompts

        body, params, prompts = await service.bodies.read(request, ChatRequest, use)
        run = await service.start(request, prompts, params, body)
        if body.stream:
            start = head("chat.completion.chunk", "chatcmpl", request, service.names[0])
            return EventStream(stream(run, body, start, _Chunks(body, service.text)), run.abort)
        start = head("chat.completion", "chatcmpl", request, service.names[0])
        (output,) = finals = await run.finals(request)
        choices = (
            _choice(completion, body, {"message": {"role": "assistant", "content": completion.text}}, service.text)
            for completion in output.outputs
        )
        answer = {**start, "choices": choices, "usage": usage_of(finals), **of_prompt(output, body)}
        return answered(answer, weight(output, body))

    return routes


class _Chunks:
    """Makes the chunks of one stream; the first of each choice names the role."""

    def __init__(self, body: ChatRequest, text: TokenText) -> None:
        self._body = body
        self._text = text
        self._begun: set[int] = set()

    def __call__(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        chunks = []
        for completion in output.outputs:
            # A token whose text is still to come has a chunk as well: clients take their times from chunks.
            going_on = completion.finish_reason is None
            delta: dict[str, Any] = {"content": completion.text} if completion.text or going_on else {}
            extra = {}
            if completion.index not in self._begun:
                extra = {} if self._begun else of_prompt(output, self._body)
                self._begun.add(completion.index)
                delta = {"role": "assistant", "content": completion.text}
            chunks.append({"choices": [_choice(completion, self._body, {"delta": delta}, self._text)], **extra})
        return chunks


def _choice(completion: CompletionOutput, body: ChatRequest, what: dict[str, Any], text: TokenText) -> dict[str, Any]:
    logprobs = None
    if body.logprobs:
        logprobs = chat_logprobs(completion.token_ids, completion.logprobs or (), body.top_logprobs or 0, text)
    return {"index": completion.index, **what, "logprobs": logprobs, **ending(completion, body)}
