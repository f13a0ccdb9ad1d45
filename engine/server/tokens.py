"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .bodies import described
from .errors import bad, json_response
from .params import refuse
from .protocol import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from .service import Service
from .workers import Check


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", response_model=TokenizeResponse, openapi_extra=described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt, or of the prompt that the chat template makes of a conversation."""

        def use(body: TokenizeRequest, check: Check) -> Response:
            service.check_model(body.model)
            token_ids = _tokenize(service, body, check)
            answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": service.max_model_len}
            answer["tokens"] = token_ids
            if body.return_token_strs:
                answer["token_strs"] = [service.text.of_token(token) or "" for token in token_ids]
            return json_response(answer)

        return await service.bodies.read(request, TokenizeRequest, use)

    @routes.post("/detokenize", response_model=DetokenizeResponse, openapi_extra=described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""

        def use(body: DetokenizeRequest, check: Check) -> Response:
            service.check_model(body.model)
            if service.text.tokenizer is None:
                raise bad("the server has no tokenizer")
            if len(body.tokens) > service.limits.detokenized:
                raise bad(f"tokens has {len(body.tokens)} ids; send at most {service.limits.detokenized}", "tokens")
            service.prompts.check_token_ids(body.tokens)
            return json_response({"prompt": service.prompts.text_of(body.tokens)})

        return await service.bodies.read(request, DetokenizeRequest, use)

    return routes


def _tokenize(service: Service, body: TokenizeRequest, check: Check) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad("give either a prompt or messages", "prompt")
    if body.messages is None:
        return service.prompts.tokenize(body.prompt or "", check, special=body.add_special_tokens is not False)
    refuse(body.model_extra or {})
    text = service.prompts.render(body.messages, body)
    # The template writes special tokens itself.
    return service.prompts.tokenize(text, check, special=bool(body.add_special_tokens))
