"""Token ids as text, if there is a tokenizer."""

from __future__ import annotations

import functools
import re
from typing import cast

from transformers import PreTrainedTokenizerBase

from .detokenizer import Decode, Detokenizer
from .sampling import SamplingParams

# Tokens of a prompt with which an output is decoded. Where each is a byte, one of these cuts between two characters.
_CONTEXTS = (4, 5, 6, 7)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes it
_TOKENS_KEPT = 65536  # texts of single tokens, which log probabilities ask for again and again

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # how tokenizers with byte fallback name a byte
# How byte-level ones do: bytes that Latin-1 prints by that character, the others in order by those from U+0100 on.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTED]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


class TokenText:
    """Decodes tokens of one model.

    Args:
        tokenizer: None if there is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.of_token = functools.lru_cache(maxsize=_TOKENS_KEPT)(self._of_token)
        self.bytes_of = functools.lru_cache(maxsize=_TOKENS_KEPT)(self._bytes_of)
        self.is_special = functools.lru_cache(maxsize=_TOKENS_KEPT)(self._is_special)

    def of(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of several tokens; there must be a tokenizer."""
        assert self.tokenizer is not None
        # Cleaning up would remove spaces that the model wrote, and other ones as the text grows.
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def detokenizer(self, sampling: SamplingParams, after: list[int]) -> Detokenizer | None:
        """What turns one output into text; None where no text is wanted or possible.

        Args:
            after: the prompt.
        """
        if self.tokenizer is None or not sampling.detokenize:
            return None
        decode = functools.partial(self.of, skip_special_tokens=sampling.skip_special_tokens)
        return Detokenizer(
            decode,
            tuple(sampling.stop or ()),
            after=self._end(after, decode),
            include_stop=sampling.include_stop_str_in_output,
        )

    def _end(self, token_ids: list[int], decode: Decode) -> list[int]:
        """The last tokens, as many as decide about the space before the next one; none if a character is unfinished."""
        ends = (token_ids[-count:] for count in _CONTEXTS)
        return next((end for end in ends if not decode(end).endswith("\ufffd")), [])

    def _of_token(self, token_id: int) -> str | None:
        if self.tokenizer is None or token_id >= len(self.tokenizer):
            return None
        try:
            text = self.of([token_id], skip_special_tokens=False)
            if str(self.tokenizer.convert_ids_to_tokens(token_id)).startswith(_SPACE):
                # Some tokenizers leave out a space at the beginning of a text, where this token seldom is.
                text = self.of([token_id, token_id], skip_special_tokens=False)[len(text) :]
        except Exception:  # the tokenizer, which is not ours, may have ids without a text
            return None
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        """A token alone in UTF-8, which may be a part of a character; nothing without a tokenizer."""
        text = self.of_token(token_id) or ""
        if "\ufffd" in text:
            assert self.tokenizer is not None
            name = str(self.tokenizer.convert_ids_to_tokens(token_id))
            if byte := _FALLBACK.fullmatch(name):
                return bytes.fromhex(byte[1])
            if _BYTES.keys() >= set(name):
                return bytes(_BYTES[character] for character in name)
        return text.encode("utf-8", "replace")

    def _is_special(self, token_id: int) -> bool:
        """Whether a text without special tokens has nothing of it."""
        return self.tokenizer is not None and not self.of([token_id, token_id], skip_special_tokens=True)
