"""`Service`: what the endpoints share: the engine, the model's names, and how prompts become requests of the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import Request as HttpRequest

from vattn.engine.async_engine import AsyncEngine, QueueFull, Stream
from vattn.engine.checks import check_encodable
from vattn.engine.requests.outputs import RequestOutput
from vattn.engine.requests.request import InvalidRequest
from vattn.engine.requests.sampling import SamplingParams
from vattn.engine.server.errors import ApiError, api_error, bad
from vattn.engine.server.metrics import Metrics
from vattn.engine.server.protocol import MOST_COMPLETIONS, CompletionRequest, Message, Sampling, Templated
from vattn.engine.server.settings import ServerSettings
from vattn.engine.server.state import StateReader
from vattn.engine.server.streams import end, until_gone

logger = logging.getLogger(__name__)

Prompt = dict[str, Any]


class Service:
    """One model behind one engine.

    Args:
        names: of the model, the first one for answers.
        root: the model as the operator gave it.
    """

    def __init__(
        self, engine: AsyncEngine, settings: ServerSettings, metrics: Metrics, state: StateReader, *, root: str
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.state = state
        self.root = root
        self.names = tuple(settings.served_model_name) or (root,)
        self.created = int(time.time())
        self.sampling_defaults = engine.llm.core.loaded.sampling_defaults
        self.text = engine.llm.core.intake.text
        self.max_model_len = engine.llm.max_model_len
        self._reader = engine.llm.core.intake.prompts
        tokenizer = engine.llm.tokenizer
        longest = max(map(len, tokenizer.get_vocab())) if tokenizer is not None else 0
        self._most_characters = self.max_model_len * longest
        self._chat_template = settings.chat_template

    def check_model(self, model: str | None) -> None:
        """Raise an ApiError, 404, for a name that the model does not have."""
        if model is not None and model not in self.names:
            raise ApiError(
                404,
                f"the model {model[:100]!r} does not exist; there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    async def read(self, prompts: Sequence[str | list[int]], body: Sampling, max_tokens: int | None) -> list[Prompt]:
        """Prompts as token ids, of a length that leaves room for `max_tokens`.

        Raises:
            InvalidRequest, ApiError: 400, one of them is not possible.
        """
        if len(prompts) * (body.n or 1) > MOST_COMPLETIONS:
            raise bad(f"{len(prompts)} prompts with n={body.n or 1} are over the limit of {MOST_COMPLETIONS} choices")
        # Tokenizing a long prompt takes longer than the event loop should wait.
        return await asyncio.to_thread(lambda: [self._read(prompt, body, max_tokens) for prompt in prompts])

    async def read_chat(self, body: Templated, sampling: Sampling, max_tokens: int | None) -> Prompt:
        """As `read`, for the prompt that the chat template makes of a conversation."""

        def make() -> Prompt:
            templated = self.apply_template(body)
            text, token_ids = templated["prompt"], templated["prompt_token_ids"]
            return {**self._read(token_ids, sampling, max_tokens), "prompt": text}

        return await asyncio.to_thread(make)

    def apply_template(self, body: Templated) -> Prompt:
        """Takes as long as the template and the tokenizer need.

        Raises:
            InvalidRequest: the template refuses these messages, or has no such variable; or they are not text.
            ApiError: 400, messages about tool calls, or options that contradict each other.
        """
        options: dict[str, Any] = {"chat_template_kwargs": body.chat_template_kwargs}
        if body.continue_final_message:
            if body.add_generation_prompt:
                raise bad(
                    "add_generation_prompt and continue_final_message contradict each other; send one",
                    "continue_final_message",
                )
            options["continue_final_message"] = True
        if body.add_generation_prompt is not None:
            options["add_generation_prompt"] = body.add_generation_prompt
        if self._chat_template is not None:
            options["chat_template"] = self._chat_template
        messages = [_plain(message) for message in body.messages]
        return self._reader.apply_chat_template(messages, **options)

    async def start(self, prompts: Sequence[Prompt], params: SamplingParams, body: Sampling, request_id: str) -> Run:
        """Queue these prompts: all of them or none, under names that begin with the id of the HTTP request.

        Raises:
            InvalidRequest, QueueFull, EngineStopped: as `AsyncEngine.add`.
            ApiError: 400, more than can ever be queued.
        """
        if body.priority and self.engine.llm.scheduler.policy != "priority":
            raise bad("priority is not supported here: the server runs requests in order of arrival", "priority")
        limit = self.engine.llm.scheduler.max_num_seqs + self.settings.max_num_queued_reqs
        if len(prompts) * params.n > limit:
            raise bad(f"{len(prompts)} prompts with n={params.n} never fit: at most {limit} choices at a time")
        if self.settings.log_prompts:
            for prompt in prompts:
                logger.info("prompt", extra={"fields": {"prompt": prompt.get("prompt") or prompt["prompt_token_ids"]}})
        salt = {"cache_salt": body.cache_salt} if body.cache_salt else {}
        try:
            salted = [{**prompt, **salt} for prompt in prompts]
            streams = await self.engine.add_all(salted, params, prefix=request_id, priority=body.priority or 0)
            return Run(self.engine, streams, request_id)
        except QueueFull:
            self.metrics.refused += 1
            raise
        except InvalidRequest as error:
            name, _, rest = str(error).partition(" ")
            if name == "structured_outputs" and not body.structured_outputs:  # the engine's word for it
                raise bad(f"response_format {rest}", "response_format") from error
            raise

    def _read(self, prompt: str | list[int], body: Sampling, max_tokens: int | None) -> Prompt:
        text = prompt if isinstance(prompt, str) else None
        special = not isinstance(body, CompletionRequest) or body.add_special_tokens is not False
        keep = body.truncate_prompt_tokens
        if keep is None and text is not None and len(text) > self._most_characters:
            # Known without the seconds that tokenizing megabytes takes.
            raise bad(
                f"the prompt has {len(text)} characters, but this model's maximum context length is "
                f"{self.max_model_len} tokens, at most {self._most_characters} characters; shorten the prompt",
                "prompt",
                "context_length_exceeded",
            )
        if keep is not None:
            if keep == 0:
                raise bad("truncate_prompt_tokens is 0; give how many tokens to keep, or -1", "truncate_prompt_tokens")
            room = self.max_model_len - max(1, max_tokens or 0)
            token_ids = self.tokenize(prompt, special=special) if isinstance(prompt, str) else prompt
            if keep > room:
                raise bad(f"truncate_prompt_tokens is {keep}, but there is room for {room}", "truncate_prompt_tokens")
            cut = token_ids[-(room if keep < 0 else keep) :]
            if len(cut) < len(token_ids):
                text = None
            prompt = cut
        elif isinstance(prompt, str) and not special:
            prompt = self.tokenize(prompt, special=False)
        token_ids = self._reader.read(prompt).token_ids
        if len(token_ids) + (max_tokens or 0) > self.max_model_len:
            raise bad(
                f"the prompt has {len(token_ids)} tokens and max_tokens is {max_tokens}, but this model's "
                f"maximum context length is {self.max_model_len} tokens; shorten the prompt, or lower max_tokens",
                "max_tokens",
                "context_length_exceeded",
            )
        return {"prompt": text, "prompt_token_ids": token_ids}

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequest: text that no encoding has.
            ApiError: 400, there is no tokenizer.
        """
        tokenizer = self.engine.llm.tokenizer
        if tokenizer is None:
            raise bad("the server has no tokenizer; send token ids")
        check_encodable("the prompt", text, InvalidRequest)
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise an InvalidRequest for a token id that the model does not have."""
        self._reader.check_token_ids("tokens", token_ids)

    def prompt_text(self, prompt: Prompt) -> str:
        """The prompt as it was sent; one of token ids as text."""
        if prompt["prompt"] is not None:
            return str(prompt["prompt"])
        if self.text.tokenizer is None:
            return ""
        return self.text.of(prompt["prompt_token_ids"], skip_special_tokens=False)


class Run:
    """The prompts of one HTTP request in the engine, which end together when the client leaves.

    Attributes:
        streams: one for each prompt, in order.
    """

    def __init__(self, engine: AsyncEngine, streams: list[Stream], request_id: str) -> None:
        self.streams = streams
        self._engine = engine
        self._request_id = request_id

    async def finals(self, request: HttpRequest) -> list[RequestOutput]:
        """The last output of each prompt.

        Raises:
            ApiError: 500, one of them failed.
            ClientGone: the client left; the prompts are aborted.
            EngineStopped: as the streams.
        """

        async def collect() -> list[RequestOutput]:
            return [(await stream.ready())[-1] for stream in self.streams]

        try:
            finals = await until_gone(request, collect())
        finally:
            self.abort()
        for output in finals:
            self.check(output)
        return finals

    async def batches(self) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """The outputs of all prompts as they come, each with the number of its prompt.

        Raises:
            EngineStopped: as the streams.
        """
        if len(self.streams) == 1:
            while batch := await self.streams[0].ready():
                yield [(0, output) for output in batch]
            return
        waiting = {asyncio.ensure_future(stream.ready()): number for number, stream in enumerate(self.streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                numbers = [(waiting.pop(task), task.result()) for task in done]
                for number, outputs in numbers:
                    if outputs:
                        waiting[asyncio.ensure_future(self.streams[number].ready())] = number
                yield [(number, output) for number, outputs in numbers for output in outputs]
        finally:
            await end(*waiting)

    def check(self, output: RequestOutput) -> None:
        """Raise an ApiError, 500, for an output of a prompt that failed; its own error stays in the log."""
        if output.error is not None:
            fields = {"request_id": self._request_id}
            logger.error("a request failed in the engine", exc_info=output.error, extra={"fields": fields})
            raise api_error(output.error) from output.error

    def abort(self) -> None:
        """End what has not ended."""
        for stream in self.streams:
            self._engine.abort(stream.request_id)


def _plain(message: Message) -> Mapping[str, Any]:
    """A message as the template gets it."""
    extra = message.model_extra or {}
    if message.role in ("tool", "function") or extra.get("tool_calls") or extra.get("function_call"):
        raise bad("messages about tool calls are not supported; write them as text of a user or assistant", "messages")
    return {**extra, "role": message.role, "content": message.content}
