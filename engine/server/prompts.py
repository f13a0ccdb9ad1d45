"""From the texts, token ids and conversations of bodies to prompts of the engine, within the limits of a request.

All of it takes its time, so it is called in a worker's thread, and ends between two parts once the client has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checks import check_encodable
from ..core import EngineCore
from ..requests.chat import CALLS, render
from ..requests.prompts import TokenizedPrompt
from ..requests.request import InvalidRequest
from .errors import bad
from .limits import Limits
from .protocol import ChatRequest, CompletionRequest, GenerateRequest, Message, Sampling, Templated
from .workers import Check

# Characters that are tokenized at a time to find out whether a text is too long. A character takes the tokenizer up to
# 800 bytes, as four tokens.
_PIECE = 2**15
# A text has hardly fewer tokens than its pieces together: a cut adds some where it is inside a word.
_TOKENS_OF_CUT = 128
# Tokens beside those that are kept, so that the latter are not where the text was cut.
_MARGIN = 1024


class Prompts:
    """Makes prompts for one engine.

    Args:
        chat_template: instead of the tokenizer's; None for that.
    """

    def __init__(self, core: EngineCore, limits: Limits, chat_template: str | None) -> None:
        self._limits = limits
        self._max_model_len = core.loaded.max_model_len
        self._tokenizer = core.loaded.tokenizer
        self._reader = core.intake.prompts
        self._text = core.intake.text
        self._chat_template = chat_template

    def read(
        self,
        prompts: Sequence[str | list[int]],
        body: CompletionRequest | GenerateRequest,
        max_tokens: int | None,
        check: Check,
        *,
        default: int,
    ) -> list[TokenizedPrompt]:
        """Prompts as token ids, of a length that leaves room for `max_tokens`.

        Args:
            default: tokens of an answer where `max_tokens` is None; prompts that are cut to fit leave room for them.

        Raises:
            InvalidRequest, ApiError: 400, one of them is not possible.
        """
        read: list[TokenizedPrompt] = []
        special = body.add_special_tokens is not False
        room = self._limits.tokens
        for prompt in prompts:
            check()
            read.append(self._read(prompt, body, max_tokens, check, default=default, special=special))
            room -= len(read[-1].token_ids)
            if room < 0:
                raise bad(
                    f"the prompts have more than {self._limits.tokens} tokens together; send them in several requests",
                    "prompt",
                    "too_many_tokens",
                )
        return read

    def read_chat(self, body: ChatRequest, max_tokens: int | None, check: Check) -> TokenizedPrompt:
        """As `read`, for the prompt that the chat template makes of a conversation."""
        text = self.render(body.messages, body)
        check()
        return replace(self._read(text, body, max_tokens, check, default=1, special=False), text=text)

    def render(self, messages: Sequence[Message], how: Templated) -> str:
        """The text that the chat template makes of a conversation.

        Raises:
            InvalidRequest: the template refuses these messages, or has no such variable; or they are not text.
            ApiError: 400, too long, messages about tool calls, or options that contradict each other.
        """
        if self._tokenizer is None:
            raise bad("the server has no tokenizer, so it cannot chat; send token ids to /v1/completions", "messages")
        options: dict[str, Any] = {"chat_template_kwargs": how.chat_template_kwargs}
        if how.continue_final_message:
            if how.add_generation_prompt:
                raise bad(
                    "add_generation_prompt and continue_final_message contradict each other; send one",
                    "continue_final_message",
                )
            options["continue_final_message"] = True
        if how.add_generation_prompt is not None:
            options["add_generation_prompt"] = how.add_generation_prompt
        if self._chat_template is not None:
            options["chat_template"] = self._chat_template
        self._check_characters("the conversation", sum(map(_characters, messages)), "messages")
        try:
            text = render(self._tokenizer, [_plain(message) for message in messages], **options)
        except RecursionError:
            param = "chat_template_kwargs" if how.chat_template_kwargs else "messages"
            raise bad(f"a value in {param} is nested too deeply; send it with fewer levels", param) from None
        self._check_characters("the conversation", len(text), "messages")
        return text

    def tokenize(self, text: str, check: Check, *, special: bool = True) -> list[int]:
        """Token ids of a text, however many.

        Raises:
            InvalidRequest: text that no encoding has.
            ApiError: 400, there is no tokenizer, or the text has too many characters.
        """
        self._needed_tokenizer()
        self._check_characters("the prompt", len(text), "prompt")
        return self._token_ids(text, check, special=special)

    def text_of(self, token_ids: list[int]) -> str:
        """Token ids as text; "" without a tokenizer."""
        return "" if self._text.tokenizer is None else self._text.of(token_ids, skip_special_tokens=False)

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise an InvalidRequest for a token id that the model does not have."""
        self._reader.check_token_ids("tokens", token_ids, param="tokens")

    def _read(
        self,
        prompt: str | list[int],
        body: Sampling,
        max_tokens: int | None,
        check: Check,
        *,
        default: int,
        special: bool,
    ) -> TokenizedPrompt:
        text = prompt if isinstance(prompt, str) else None
        field = body.max_tokens_field
        if body.truncate_prompt_tokens is None:
            token_ids = prompt if isinstance(prompt, list) else self._fitting_ids(prompt, check, special=special)
        else:
            keep = self._kept(body.truncate_prompt_tokens, max_tokens, default, field)
            first = body.truncation_side == "right"
            token_ids, cut = self._cut_ids(prompt, keep, check, first=first, special=special)
            text = None if cut else text
        given = {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": body.cache_salt}
        read = self._reader.read(given, max_tokens)
        token_ids = read.token_ids
        if len(token_ids) + (max_tokens or 0) > self._max_model_len:
            raise bad(
                f"the prompt has {len(token_ids)} tokens and {field} is {max_tokens}, but this model's "
                f"maximum context length is {self._max_model_len} tokens; shorten the prompt, or lower {field}",
                field,
                "context_length_exceeded",
            )
        return read

    def _fitting_ids(self, text: str, check: Check, *, special: bool) -> list[int]:
        """Token ids of a text that may fit into the context."""
        self._needed_tokenizer()
        self._check_characters("the prompt", len(text), "prompt")
        if len(text) > _PIECE:
            most = self._max_model_len + self._max_model_len // 8
            count = 0
            for start in range(0, len(text), _PIECE):
                count += len(self._token_ids(text[start : start + _PIECE], check, special=False)) - _TOKENS_OF_CUT
                if count > most:
                    raise bad(
                        f"the prompt has more than {most} tokens, but this model's maximum context length is "
                        f"{self._max_model_len} tokens; shorten the prompt",
                        "prompt",
                        "context_length_exceeded",
                    )
        return self._token_ids(text, check, special=special)

    def _kept(self, asked: int, max_tokens: int | None, default: int, field: str) -> int:
        """How many tokens of a prompt are kept at most, where `truncate_prompt_tokens` is `asked`."""
        if asked == 0:
            raise bad("truncate_prompt_tokens is 0; give how many tokens to keep, or -1", "truncate_prompt_tokens")
        if max_tokens is not None and max_tokens >= self._max_model_len:
            raise bad(
                f"{field} is {max_tokens}, but this model's maximum context length is {self._max_model_len} tokens, "
                f"of which the prompt has at least one; lower {field} to {self._max_model_len - 1} or less",
                field,
                "context_length_exceeded",
            )
        room = self._max_model_len - (1 if max_tokens is None else max_tokens)
        if asked > room:
            raise bad(
                f"truncate_prompt_tokens is {asked}, but there is room for {room}; give at most that, or -1",
                "truncate_prompt_tokens",
            )
        if asked > 0:
            return asked
        return max(1, self._max_model_len - default) if max_tokens is None else room

    def _cut_ids(
        self, prompt: str | list[int], keep: int, check: Check, *, first: bool, special: bool
    ) -> tuple[list[int], bool]:
        """The first or the last token ids of a prompt, and whether there are others."""
        if isinstance(prompt, str):
            size, count = 0, 0
            while size < len(prompt) and count < keep + _MARGIN:
                start, size = size, min(len(prompt), size + _PIECE)
                piece = prompt[start:size] if first else prompt[len(prompt) - size : len(prompt) - start]
                count += len(self._token_ids(piece, check, special=False))
            part = prompt[:size] if first else prompt[len(prompt) - size :]
            prompt = self._token_ids(part, check, special=special)
        return prompt[:keep] if first else prompt[-keep:], len(prompt) > keep

    def _token_ids(self, text: str, check: Check, *, special: bool) -> list[int]:
        tokenizer = self._needed_tokenizer()
        check()
        check_encodable("the prompt", text, InvalidRequest, "prompt")
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    def _needed_tokenizer(self) -> Any:
        """The tokenizer, looked for before characters are counted: without one their limit is 0."""
        if self._tokenizer is None:
            raise bad("the server has no tokenizer; send token ids", "prompt")
        return self._tokenizer

    def _check_characters(self, what: str, count: int, param: str) -> None:
        most = self._limits.characters
        if count > most:
            raise bad(
                f"{what} has {count} characters, but this model's maximum context length is {self._max_model_len} "
                f"tokens, at most {most} characters; shorten it",
                param,
                "context_length_exceeded",
            )


def _characters(message: Message) -> int:
    if isinstance(message.content, list):
        return sum(len(value) for part in message.content for value in part.values() if isinstance(value, str))
    return len(message.content or "")


def _plain(message: Message) -> Mapping[str, Any]:
    """A message as the template gets it."""
    extra = message.model_extra or {}
    if message.role in ("tool", "function") or any(extra.get(name) for name in CALLS):
        raise bad("messages about tool calls are not supported; write them as text of a user or assistant", "messages")
    return {**extra, "role": message.role, "content": message.content}
