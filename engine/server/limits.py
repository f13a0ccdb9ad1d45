"""`Limits`: how large a request may be, so that none takes more than 64 MiB or keeps the others waiting.

They are in numbers that are known before the memory is taken, and grow with the model's context, so that whatever fits
into it is possible. From a context of 64K tokens on, the tokenizer's 85 bytes a character may add up to more.
"""

from __future__ import annotations

from dataclasses import dataclass

# 4 MiB of JSON become up to 40 MiB of Python objects: text takes up to 4 bytes a character, and is copied once.
_BODY_BYTES = 2**22
_VALUES = 2**18  # 80 bytes each, as the members of small objects
_CHARACTERS = 2**19
_LOGPROBS = 2**18  # 170 bytes each, until they are written
_DETOKENIZED = 2**16


@dataclass(frozen=True)
class Limits:
    """The largest request.

    Attributes:
        body_bytes: of its body.
        values: in its body: texts, numbers, names of fields, lists and objects.
        characters: of a text, also of one that the chat template makes, and of a conversation's messages together.
        tokens: of its prompts together.
        logprobs: that an answer reports, alternatives included.
        detokenized: tokens that become text in one request.
    """

    body_bytes: int
    values: int
    characters: int
    tokens: int
    logprobs: int
    detokenized: int

    @classmethod
    def of(cls, max_model_len: int, longest_token: int, body_bytes: int | None) -> Limits:
        """The limits of a server.

        Args:
            longest_token: of the tokenizer, in characters; 0 without one, where no text is read.
            body_bytes: None for what suits the context.
        """
        return cls(
            body_bytes=max(_BODY_BYTES, 32 * max_model_len) if body_bytes is None else body_bytes,
            values=max(_VALUES, 2 * max_model_len),
            characters=min(max_model_len * longest_token, max(_CHARACTERS, 8 * max_model_len)),
            tokens=max(_VALUES, max_model_len),
            logprobs=max(_LOGPROBS, 2 * max_model_len),
            detokenized=max(_DETOKENIZED, max_model_len),
        )
