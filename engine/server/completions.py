"""`/v1/completions`, and the simpler `/generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..requests.outputs import CompletionOutput, RequestOutput
from ..requests.prompts import TokenizedPrompt
from ..requests.sampling import SamplingParams
from .answers import answered, ending, head, of_prompt, stream, usage_of, weight
from .bodies import described
from .logprobs import TextLogprobs
from .params import sampling_params
from .protocol import CompletionRequest, CompletionResponse, GenerateRequest, GenerateResponse
from .service import Service
from .streams import EventStream
from .workers import Check

_DEFAULT_TOKENS = 16


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=CompletionResponse, openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Complete prompts: text or token ids, one or several. With `stream`, as server-sent events."""

        def use(body: CompletionRequest, check: Check) -> tuple[SamplingParams, list[TokenizedPrompt], _Completion]:
            service.check_model(body.model)
            params = sampling_params(
                body,
                service.sampling_defaults,
                max_tokens=_DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens,
                logprobs=body.logprobs,
                echo=bool(body.echo),
            )
            prompts = _prompts(body)
            service.check_size(len(prompts), params)
            read = service.prompts.read(prompts, body, body.max_tokens, check, default=_DEFAULT_TOKENS)
            service.check_logprobs(read, params, each=True)
            texts = [_text(service, prompt) for prompt in read] if body.echo else []
            return params, read, _Completion(service, body, texts)

        params, prompts, answer = await service.bodies.read(request, CompletionRequest, use)
        body = answer.body
        run = await service.start(request, prompts, params, body)
        start = head("text_completion", "cmpl", request, service.names[0])
        if body.stream:
            return EventStream(stream(run, body, start, answer.chunks), run.abort)
        finals = await run.finals(request)
        choices = (choice for number, output in enumerate(finals) for choice in answer.choices(number, output))
        size = sum(weight(output, body) for output in finals)
        return answered({**start, "choices": choices, "usage": usage_of(finals)}, size)

    @routes.post("/generate", response_model=GenerateResponse, openapi_extra=described(GenerateRequest))
    async def generate(request: Request) -> Response:
        """Complete one prompt; the answer's texts begin with it. With `stream`, events with the texts so far."""

        def use(
            body: GenerateRequest, check: Check
        ) -> tuple[GenerateRequest, SamplingParams, list[TokenizedPrompt], str]:
            service.check_model(body.model)
            max_tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
            params = sampling_params(body, service.sampling_defaults, max_tokens=max_tokens, logprobs=None, echo=False)
            service.check_size(1, params)
            prompts = service.prompts.read([body.prompt], body, body.max_tokens, check, default=_DEFAULT_TOKENS)
            return body, params, prompts, _text(service, prompts[0])

        body, params, prompts, text = await service.bodies.read(request, GenerateRequest, use)
        run = await service.start(request, prompts, params, body)
        texts = [text] * params.n

        def chunks(number: int, output: RequestOutput) -> list[dict[str, Any]]:
            for completion in output.outputs:
                texts[completion.index] += completion.text
            return [{"text": list(texts)}]

        if body.stream:
            return EventStream(stream(run, body, {}, chunks), run.abort)
        finals = await run.finals(request)
        return answered(chunks(0, finals[0])[0], weight(finals[0], body))

    return routes


class _Completion:
    """Makes the choices of one answer.

    Args:
        texts: of the prompts, where the body asks for them.
    """

    def __init__(self, service: Service, body: CompletionRequest, texts: Sequence[str]) -> None:
        self.body = body
        self._service = service
        self._texts = texts
        self._n = body.n or 1
        self._logprobs: dict[int, TextLogprobs] = {}  # by choice
        self._begun: set[int] = set()

    def choices(self, number: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The news of an output, or all of a finished one, of the prompt with this number; made as they are written."""
        return (self._choice(number, output, completion) for completion in output.outputs)

    def chunks(self, number: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        # A token whose text is still to come has a chunk as well: clients take their times from chunks.
        return ({"choices": [choice]} for choice in self.choices(number, output))

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        body = self.body
        index = number * self._n + completion.index
        first = index not in self._begun
        self._begun.add(index)
        echo = self._texts[number] if body.echo and first else ""
        choice: dict[str, Any] = {"index": index, "text": echo + completion.text, "logprobs": None}
        if body.logprobs is not None:
            if index not in self._logprobs:
                skips = body.skip_special_tokens is not False
                self._logprobs[index] = TextLogprobs(body.logprobs, self._service.text, skip_special_tokens=skips)
            reports = self._logprobs[index]
            # A request that ended before its prompt was computed has no reports of it.
            scored = output.prompt_logprobs
            asked = () if scored is None else zip(output.prompt_token_ids, scored, strict=True)
            before = reports.prompt(asked, len(echo)) if body.echo and first else {}
            after = reports.piece(zip(completion.token_ids, completion.logprobs or (), strict=True))
            choice["logprobs"] = {name: chain(before[name], after[name]) for name in before} or after
        choice |= ending(completion, body)
        return choice | of_prompt(output, body) if first else choice


def _text(service: Service, prompt: TokenizedPrompt) -> str:
    """The prompt as it was sent; one of token ids as text."""
    return service.prompts.text_of(prompt.token_ids) if prompt.text is None else prompt.text


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Each prompt as text or token ids."""
    prompt: Any = body.prompt
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return list(prompt) if several else [prompt]
