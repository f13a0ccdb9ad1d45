"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from fastapi.responses import Response

from vattn.engine.server.errors import bad, json_response
from vattn.engine.server.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    Templated,
    TokenizeRequest,
    TokenizeResponse,
)
from vattn.engine.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a prompt, or of the prompt that the chat template makes of a conversation."""
        service.check_model(body.model)
        token_ids = await asyncio.to_thread(_tokenize, service, body)
        answer = {"count": len(token_ids), "max_model_len": service.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = [service.text.of_token(token) or "" for token in token_ids]
        return json_response(answer)

    @routes.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        if service.text.tokenizer is None:
            raise bad("the server has no tokenizer")
        service.check_token_ids(body.tokens)
        text = await asyncio.to_thread(service.text.of, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    return routes


def _tokenize(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad("give either a prompt or messages", "prompt")
    if body.messages is None:
        special = body.add_special_tokens is not False
        return service.tokenize(body.prompt or "", special=special)
    templated = service.apply_template(
        Templated(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    )
    if body.add_special_tokens:
        return service.tokenize(str(templated["prompt"]))
    return list(templated["prompt_token_ids"])
