"""The forms that a prompt may have, and how it becomes token ids of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from vattn.integers import shown

from ..checks import check_encodable, whole
from .bad_words import BadWords
from .chat import Conversation, render
from .request import ContextTooLong, InvalidRequest

# Token ids may be an array of numpy's or a tensor, of one dimension.
Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any] | TokenizedPrompt"

_PARAM = "prompt"  # of errors
# What a prompt that is a mapping may have.
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt that `PromptReader.read` has checked: what the engine takes, and no caller makes.

    Attributes:
        text: None where it was given as token ids only.
        cache_salt: prompts with different ones share no prefix in the cache.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: bytes = b""


class PromptReader:
    """Prompts of one model.

    Args:
        tokenizer: None where prompts are token ids only.
        vocab_size: token ids of the model: `0 .. vocab_size - 1`.
        max_model_len: most tokens of prompt and output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def read(self, prompt: Prompt, max_tokens: int | None = None) -> TokenizedPrompt:
        """The prompt as token ids; one that was read before is returned as it is.

        Args:
            max_tokens: of the output, for which there is room for at least one token, unless this is 0.

        Raises:
            InvalidRequest: says what is wrong with the prompt.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        found = self._of_mapping(prompt) if isinstance(prompt, Mapping) else self._tokenize(prompt)
        token_ids = found.token_ids
        if not token_ids:
            raise InvalidRequest("the prompt is empty; give at least one token", param=_PARAM)
        if len(token_ids) + (max_tokens != 0) > self.max_model_len:
            output = "" if max_tokens == 0 else " and the output needs at least one"
            raise ContextTooLong(
                f"the prompt has {len(token_ids)} tokens, but this model's maximum context length is "
                f"{self.max_model_len} tokens (max_model_len){output}; shorten the prompt, or raise max_model_len "
                "where the model allows it",
                param=_PARAM,
            )
        self.check_token_ids("the prompt", token_ids, param=_PARAM)
        return found

    def check_token_ids(self, what: str, token_ids: Sequence[int], *, param: str) -> None:
        """Raise an InvalidRequest for a token id that the model does not have."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise InvalidRequest(
                f"{what} holds {shown(wrong)}, which is no token id of this model: those are whole numbers from "
                f"0 to {self.vocab_size - 1}",
                param=param,
            )

    def bad_words(self, words: Sequence[str]) -> BadWords:
        """The token sequences of the model that write these words, at the beginning of a text and after a space."""
        sequences: list[list[int]] = []
        for word in words:
            assert self.tokenizer is not None
            for text in (word.lstrip(" "), " " + word.lstrip(" ")):
                token_ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
                # A tokenizer may have more tokens than the model, which never samples those.
                if token_ids and max(token_ids) < self.vocab_size and token_ids not in sequences:
                    sequences.append(token_ids)
        return BadWords(sequences)

    def apply_chat_template(self, conversation: Conversation, **options: Any) -> dict[str, Any]:
        """The prompt that the tokenizer's chat template makes of a conversation.

        Args:
            options: those of `vattn.engine.requests.chat.render`.

        Raises:
            InvalidRequest: as `render`, or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequest("a chat needs a tokenizer, which this LLM does not have; pass tokenizer=...")
        text = render(self.tokenizer, conversation, **options)
        # The template has already added the special tokens.
        return {"prompt": text, "prompt_token_ids": self.tokenizer(text, add_special_tokens=False)["input_ids"]}

    def _of_mapping(self, prompt: Mapping[str, Any]) -> TokenizedPrompt:
        given = {key: value for key, value in prompt.items() if value is not None}
        if "prompt" not in given and "prompt_token_ids" not in given:
            raise InvalidRequest(
                f"the prompt {shown(dict(prompt))} has neither 'prompt' nor 'prompt_token_ids'", param=_PARAM
            )
        if unknown := [key for key in given if key not in _KEYS]:
            raise InvalidRequest(
                f"the prompt has {shown(unknown[0])}, which is not known here: the model reads text only; a prompt can "
                f"have {', '.join(_KEYS)}",
                param=_PARAM,
            )
        salt = given.get("cache_salt", "")
        if not isinstance(salt, str):
            raise InvalidRequest(f"the prompt's cache_salt is {shown(salt)}; give text", param="cache_salt")
        check_encodable("the prompt's cache_salt", salt, InvalidRequest, "cache_salt")
        text = given.get("prompt")
        if "prompt_token_ids" not in given:
            return replace(self._tokenize(text), cache_salt=salt.encode())
        if not isinstance(text, str | None):
            raise InvalidRequest(f"the prompt's text is {shown(text)}; give text, or leave it out", param=_PARAM)
        return TokenizedPrompt(text, _as_token_ids(given["prompt_token_ids"]), salt.encode())

    def _tokenize(self, prompt: object) -> TokenizedPrompt:
        if not isinstance(prompt, str):
            return TokenizedPrompt(None, _as_token_ids(prompt))
        if self.tokenizer is None:
            raise InvalidRequest(
                "the prompt is text, but this LLM has no tokenizer; give token ids, or pass tokenizer=...", param=_PARAM
            )
        check_encodable("the prompt", prompt, InvalidRequest, _PARAM)
        return TokenizedPrompt(prompt, list(self.tokenizer(prompt)["input_ids"]))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is text, a mapping, or a sequence or array that starts with a number; an empty one is no prompts.

    Raises:
        InvalidRequest: it is none of these.
    """
    if isinstance(prompts, str | Mapping | TokenizedPrompt):
        return [prompts]
    try:
        listed = list(_of_an_array(prompts))
    except TypeError:
        raise _not_a_prompt(prompts) from None
    if isinstance(prompts, bytes | bytearray | set | frozenset) or not hasattr(prompts, "__len__"):
        raise _not_a_prompt(prompts)
    if listed and whole(listed[0]) is not None:
        return [listed]
    return listed


def _as_token_ids(prompt: object) -> list[int]:
    if isinstance(prompt, str | bytes | bytearray | Mapping | set | frozenset):
        raise _not_a_prompt(prompt)
    try:
        values = list(_of_an_array(prompt))
    except TypeError:
        raise _not_a_prompt(prompt) from None
    if {int}.issuperset(map(type, values)):
        return values
    token_ids = [whole(value) for value in values]
    if None in token_ids:
        raise _not_a_prompt(prompt)
    return cast(list[int], token_ids)


def _of_an_array(values: Any) -> Any:
    """A tensor or an array as lists of Python's numbers; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _not_a_prompt(prompt: object) -> InvalidRequest:
    hint = "; decode bytes to text first" if isinstance(prompt, bytes | bytearray) else ""
    return InvalidRequest(
        "a prompt is text, a sequence of whole numbers (token ids), or a mapping with 'prompt' or "
        f"'prompt_token_ids'; this is {shown(prompt)}{hint}",
        param=_PARAM,
    )
