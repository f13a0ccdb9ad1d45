"""Token ids as text, if there is a tokenizer."""

from __future__ import annotations

import functools
from typing import cast

from transformers import PreTrainedTokenizerBase

from .detokenizer import Detokenizer
from .sampling import SamplingParams

_TOKENS_KEPT = 65536  # texts of single tokens, which log probabilities ask for again and again


class TokenText:
    """Decodes tokens of one model.

    Args:
        tokenizer: None if there is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.of_token = functools.lru_cache(maxsize=_TOKENS_KEPT)(self._of_token)

    def of(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of several tokens; there must be a tokenizer."""
        assert self.tokenizer is not None
        # Cleaning up would remove spaces that the model wrote, and other ones as the text grows.
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def detokenizer(self, sampling: SamplingParams) -> Detokenizer | None:
        """What turns one output into text; None where no text is wanted or possible."""
        if self.tokenizer is None or not sampling.detokenize:
            return None
        decode = functools.partial(self.of, skip_special_tokens=sampling.skip_special_tokens)
        return Detokenizer(decode, tuple(sampling.stop or ()), include_stop=sampling.include_stop_str_in_output)

    def _of_token(self, token_id: int) -> str | None:
        if self.tokenizer is None or token_id >= len(self.tokenizer):
            return None
        return self.of([token_id], skip_special_tokens=False)
