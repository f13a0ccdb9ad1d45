"""What a model gives a request, by itself: transformers' own forward pass over all tokens at once, and arithmetic on
one row after another. Nothing of the engine's is used but the names of parameters and the rule for random numbers.

Given tokens are judged instead of being generated, since one pass is then enough: each must be one that may follow
those before it. Where rounding decides, both are right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import regex
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.tiny_models import random_model

BYTES = 256
BOS, EOS, PAD, OTHER_EOS = 256, 257, 258, 259
VOCAB = 264  # the last tokens are unknown to the tokenizer
_NAMES = {BOS: b"<s>", EOS: b"</s>", PAD: b"<pad>", OTHER_EOS: b"<end>"}
CONTEXT = 192

Row = npt.NDArray[np.float64]

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, OTHER_EOS],
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
# By name: transformers' class, and what differs.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("LlamaConfig", {}),
    "window": ("MistralConfig", {"sliding_window": 21}),
    "mixed": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
}

# The share of a row's mass, and of a probability, by which float32 may be off.
_ROUNDING = 1e-4
_REPLACED = "\N{REPLACEMENT CHARACTER}"
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Wrong(Exception):
    """An output that the model does not give."""


def make_model(family: str) -> PreTrainedModel:
    """A tiny model in float64: no two tokens are so close that the order of a sum decides between them.

    It seldom writes what is not ASCII.
    """
    name, changes = FAMILIES[family]
    model = random_model(name, **{**_BASE, **changes}).double()
    with torch.no_grad():
        model.get_output_embeddings().weight[128:BYTES] *= 0.1
    return model


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    """The one that nothing but this module may use."""
    return make_model(family)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {_byte(letter): letter for letter in alphabet}
    vocabulary = {by_byte[number]: number for number in range(BYTES)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    fast.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    fast.add_special_tokens({"additional_special_tokens": ["<end>"]})
    assert [fast(name.decode())["input_ids"] for name in _NAMES.values()] == [[token] for token in _NAMES]
    return fast


def _byte(letter: str) -> int:
    """What byte a letter of byte-level tokenizers stands for: themselves where printable, the others in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(BYTES) if number not in printable]
    return ord(letter) if ord(letter) in printable else others[ord(letter) - BYTES]


def uniform(seed: int, index: int) -> float:
    """Random number `index` of a request: SplitMix64, whose state begins with the seed's own mix."""
    bits = _mix((_mix(seed & _MASK) + (index + 1) * _GOLDEN) & _MASK)
    return float((bits >> 11) * 2.0**-53)


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


@dataclass(frozen=True)
class Form:
    """A form that an output may have to have.

    Attributes:
        wanted: in the words of `structured_outputs`.
        pattern: the same, as a regular expression for texts in ASCII.
    """

    wanted: dict[str, Any]
    pattern: str

    def allowed(self, text: str) -> tuple[list[int], bool]:
        """The tokens that may follow this text, and whether it may end here."""
        compiled = regex.compile(self.pattern)
        letters = [n for n in range(128) if compiled.fullmatch(text + chr(n), partial=True) is not None]
        return letters, compiled.fullmatch(text) is not None


@dataclass(frozen=True)
class Asked:
    """A request, as far as its tokens depend on it: one completion.

    Attributes:
        params: keywords of `SamplingParams`, with a seed where tokens are drawn.
        seed: of this completion.
    """

    family: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    form: Form | None
    seed: int
    longest: int  # of prompt and output

    @property
    def ends(self) -> set[int]:
        """Tokens that end it."""
        ends = set(self.params.get("stop_token_ids", ()))
        return ends if self.params.get("ignore_eos") else ends | {EOS, OTHER_EOS}

    def judge(self, tokens: Sequence[int], reports: Sequence[dict[int, Any]] | None = None) -> Row:
        """Whether each of these tokens may follow those before it, and none comes after an end.

        Args:
            reports: log probabilities as they were told, if they were asked for.

        Returns:
            Edited logits `[VOCAB]` of the token after them.

        Raises:
            Wrong: says which.
        """
        rows = _logits(self.family, [*self.prompt, *tokens])[len(self.prompt) - 1 :]
        for place, token in enumerate(tokens):
            if why := self.end(tokens[:place]):
                raise Wrong(f"token {place} comes after the end: {why}")
            row = self._edited(rows[place], tokens[:place])
            if not math.isfinite(row[token]):
                raise Wrong(f"token {place}, {token}, is excluded")
            if self.params.get("temperature", 1.0) == 0:
                if row[token] < row.max() - _ROUNDING:
                    raise Wrong(f"token {place} is {token}, not {int(row.argmax())}: {row[token]} < {row.max()}")
            else:
                self._judge_drawn(row, token, place)
            if reports is not None:
                masked = self._masked(rows[place].copy(), tokens[:place])
                check_report(masked, token, reports[place], self.params["logprobs"], f"token {place}")
        return self._edited(rows[len(tokens)], tokens)

    def end(self, tokens: Sequence[int]) -> str:
        """Why an output ends with the last of these tokens; empty if it does not."""
        count = len(tokens)
        if count and count > self.params.get("min_tokens", 0) and tokens[-1] in self.ends:
            return "stop token"
        if count and self.stop_string(tokens) is not None:
            return "stop string"
        if self.form is not None and count and not self.form.allowed(_ascii(tokens))[0]:
            return "form"
        if count == self.params.get("max_tokens", 16) or len(self.prompt) + count == self.longest:
            return "length"
        return ""

    def stop_string(self, tokens: Sequence[int]) -> str | None:
        """The stop string that the last of these tokens completes: the first one, of several the longest."""
        place = self._stop(tokens)
        return None if place is None else place[2]

    def _stop(self, tokens: Sequence[int]) -> tuple[int, int, str] | None:
        """Where in the text that stop string ends and begins."""
        if len(tokens) <= self.params.get("min_tokens", 0):
            return None
        before, written = len(self._written(tokens[:-1])), self._written(tokens)
        found = []
        for stop in self.params.get("stop", ()):
            start = written.find(stop.encode(), max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found, default=None)

    def _written(self, tokens: Sequence[int]) -> bytes:
        names = {} if self.params.get("skip_special_tokens", True) else _NAMES
        return b"".join(bytes([token]) if token < BYTES else names.get(token, b"") for token in tokens)

    def check_text(self, tokens: Sequence[int], text: str) -> None:
        """Compares the text of an output that has ended; of what is no UTF-8, the characters in ASCII."""
        why, included = self.end(tokens), self.params.get("include_stop_str_in_output", False)
        written = self._written(tokens[:-1] if why == "stop token" and not included else tokens)
        cut = False
        if why == "stop string" and (place := self._stop(tokens)) is not None:
            end, start, _ = place
            written = written[: end if included else start]
            cut = True
        expected = written.decode(errors="replace")
        if _REPLACED in expected[:-1]:
            expected, text = ("".join(filter(str.isascii, each)) for each in (expected, text))
        # What the last tokens leave unfinished is no text, but what a stop string follows is finished.
        if text != (expected if cut else expected.rstrip(_REPLACED)):
            raise Wrong(f"the text is {text!r}, not {expected!r}")

    def _edited(self, logits: Row, tokens: Sequence[int]) -> Row:
        params, row = self.params, logits.copy()
        if (allowed := params.get("allowed_token_ids")) is not None:
            row[[token for token in range(VOCAB) if token not in allowed]] = -math.inf
        for word in params.get("bad_words", ()):
            for *head, last in {tuple(word.lstrip(" ").encode()), tuple(b" " + word.lstrip(" ").encode())}:
                if list(tokens[len(tokens) - len(head) :]) == head:
                    row[last] = -math.inf
        if len(tokens) < params.get("min_tokens", 0):
            row[[*params.get("stop_token_ids", ()), EOS, OTHER_EOS]] = -math.inf
        for token, bias in params.get("logit_bias", {}).items():
            row[token] += bias
        repetition = params.get("repetition_penalty", 1.0)
        for token in {*self.prompt, *tokens}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(tokens):
            row[token] -= params.get("frequency_penalty", 0.0) * list(tokens).count(token)
            row[token] -= params.get("presence_penalty", 0.0)
        return self._masked(row, tokens)

    def _masked(self, row: Row, tokens: Sequence[int]) -> Row:
        if self.form is not None:
            letters, whole = self.form.allowed(_ascii(tokens))
            kept = [*letters, *([EOS, OTHER_EOS] if whole and not self.params.get("ignore_eos") else [])]
            excluded = np.ones(VOCAB, dtype=bool)
            excluded[kept] = False
            row[excluded] = -math.inf
        return row

    def _judge_drawn(self, row: Row, token: int, place: int) -> None:
        weights = np.exp((row - row.max()) / max(self.params.get("temperature", 1.0), 1e-30))
        kept, certain = _filtered(weights, self.params)
        if not certain:
            return
        if not kept[token]:
            raise Wrong(f"token {place}, {token}, is filtered out")
        ends = np.cumsum(np.where(kept, weights, 0))
        low, high = (ends[token] - weights[token]) / ends[-1], ends[token] / ends[-1]
        if not low - _ROUNDING <= (number := uniform(self.seed, place)) <= high + _ROUNDING:
            raise Wrong(f"token {place} is {token}, of {low} to {high}, where {number} was drawn")


def check_report(row: Row, token: int, report: dict[int, Any], count: int, what: str) -> None:
    """Compare log probabilities that were told with those of a row of logits."""
    logprobs = row - row.max()
    logprobs -= math.log(np.exp(logprobs).sum())
    if next(iter(report)) != token or len(report) not in (count, count + 1):
        raise Wrong(f"{what}: the report has {list(report)}, where {token} and {count} more were asked for")
    for other, entry in report.items():
        expected = logprobs[other]
        if entry.logprob != expected and not abs(entry.logprob - expected) < 1e-3:
            raise Wrong(f"{what}: the log probability of {other} is {entry.logprob}, not {expected}")
        least, most = (int((logprobs > expected + slack).sum()) + 1 for slack in (1e-3, -1e-3))
        if not least <= entry.rank <= (most if math.isfinite(expected) else VOCAB):
            raise Wrong(f"{what}: the rank of {other} is {entry.rank}, not {least} to {most}")


def check_prompt_reports(family: str, prompt: Sequence[int], reports: Sequence[Any], count: int) -> None:
    """Compare the log probabilities of a prompt's tokens."""
    rows = _logits(family, prompt)
    if len(reports) != len(prompt) or reports[0] is not None:
        raise Wrong(f"{len(reports)} reports of a prompt of {len(prompt)} tokens")
    for place, report in enumerate(reports[1:]):
        check_report(rows[place], prompt[place + 1], report, count, f"prompt token {place + 1}")


def generated(family: str, prompt: Sequence[int], params: dict[str, Any], longest: int) -> list[int]:
    """What transformers' `generate` gives a greedy request without anything that it has no word for."""
    ids = torch.tensor([list(prompt)])
    ends = [*params.get("stop_token_ids", ()), *([] if params.get("ignore_eos") else [EOS, OTHER_EOS])]
    found = model_of(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(params.get("max_tokens", 16), longest - len(prompt)),
        do_sample=False,
        eos_token_id=ends or None,
        repetition_penalty=params.get("repetition_penalty", 1.0),
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def beams(
    family: str, prompt: Sequence[int], width: int, most: int, *, ignore_eos: bool, penalty: float
) -> list[tuple[list[int], float, float]]:
    """The best sequences of a beam search, every one computed whole in every step: tokens, log probability, score."""

    def score(tokens: Sequence[int], total: float) -> float:
        ended = not ignore_eos and tokens[-1] in (EOS, OTHER_EOS) and len(tokens) > len(prompt)
        return float(total / (len(tokens) - ended) ** penalty)

    live: list[tuple[list[int], float]] = [(list(prompt), 0.0)]
    completed: list[tuple[list[int], float]] = []
    for _ in range(most):
        with torch.no_grad():
            logits = model_of(family)(torch.tensor([tokens for tokens, _ in live]), use_cache=False).logits[:, -1]
        grown = []
        top = logits.log_softmax(-1).topk(2 * width)
        for (tokens, total), values, ids in zip(live, top.values.tolist(), top.indices.tolist(), strict=True):
            for logprob, token in zip(values, ids, strict=True):
                ended = not ignore_eos and token in (EOS, OTHER_EOS)
                (completed if ended else grown).append(([*tokens, token], total + logprob))
        live = sorted(grown, key=lambda beam: beam[1], reverse=True)[:width]
    found = [(tokens, total, score(tokens, total)) for tokens, total in completed + live]
    return sorted(found, key=lambda beam: beam[2], reverse=True)


def _logits(family: str, tokens: Sequence[int]) -> Row:
    with torch.no_grad():
        found: Row = model_of(family)(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return found


def _filtered(weights: Row, params: dict[str, Any]) -> tuple[npt.NDArray[np.bool_], bool]:
    """The tokens that the filters keep, and whether that is certain whatever is rounded."""
    kept, certain = np.ones(len(weights), dtype=bool), True

    def keep(least: float) -> None:
        nonlocal certain
        below = kept & (weights < least)
        certain = certain and not (weights[below] > least * (1 - _ROUNDING)).any()
        kept[below] = False

    if min_p := params.get("min_p", 0.0):
        certain = not (abs(weights - min_p) < min_p * _ROUNDING).any()
        keep(min_p)
    if (top_k := params.get("top_k", 0)) > 0:
        keep(float(np.sort(np.where(kept, weights, 0))[-top_k]))
    if (top_p := params.get("top_p", 1.0)) < 1:
        ascending = np.sort(np.where(kept, weights, 0))
        sums = np.cumsum(ascending)
        bound = (1 - top_p) * sums[-1]
        certain = certain and not (abs(sums - bound) < sums[-1] * _ROUNDING).any()
        keep(float(ascending[int((sums > bound).argmax())]))
    return kept, certain


def _bytes(tokens: Sequence[int]) -> bytes:
    return bytes(token for token in tokens if token < BYTES)


def _ascii(tokens: Sequence[int]) -> str:
    return _bytes(tokens).decode("ascii", "replace")
