"""From logits to tokens: distributions as in transformers' processors, seeds, extremes, and rows that say nothing."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from vattn.engine import SamplingParams
from vattn.engine.model import sampler
from vattn.engine.model.forward import Row
from vattn.engine.model.sampler import Batch, Sampler, draw, filter_weights, uniform
from vattn.engine.requests.bad_words import BadWords
from vattn.engine.requests.request import Request

CPU = torch.device("cpu")


def make(
    seed: int = 0,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    bad_words_ids: Sequence[list[int]] = (),
    **params: Any,
) -> Request:
    sampling = SamplingParams(**{"max_tokens": 10_000, **params})
    request = Request(
        "r",
        list(prompt),
        sampling,
        max_total_tokens=100_000,
        seed=seed,
        held_token_ids=frozenset({3, *(sampling.stop_token_ids or ())}),
        bad_words=BadWords(bad_words_ids),
    )
    request.output_token_ids = list(output)
    return request


def batch_of(requests: Sequence[Request]) -> Batch:
    return Batch(list(map(Row, requests)), CPU, None)


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
    return Sampler().sample(logits, list(map(Row, requests)))


def random_logits(rows: int, vocab_size: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_greedy_takes_the_largest() -> None:
    logits = random_logits(5, 40)
    for dtype in (torch.float32, torch.bfloat16):
        rows = logits.to(dtype)
        assert sample(rows, [make(temperature=0) for _ in rows]) == rows.argmax(-1).tolist()


GREEDY: dict[str, Any] = {"temperature": 0}
FILTERS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"top_k": 1}, [hf.TopKLogitsWarper(1)]),
    ({"top_k": 7}, [hf.TopKLogitsWarper(7)]),
    ({"top_k": 1500}, [hf.TopKLogitsWarper(1500)]),
    ({"top_k": 100_000}, []),
    ({"top_p": 0.01}, [hf.TopPLogitsWarper(0.01)]),
    ({"top_p": 0.6}, [hf.TopPLogitsWarper(0.6)]),
    ({"top_p": 0.999}, [hf.TopPLogitsWarper(0.999)]),
    ({"min_p": 0.05}, [hf.MinPLogitsWarper(0.05)]),
    ({"min_p": 1.0}, [hf.MinPLogitsWarper(1.0)]),
    ({"top_k": 50, "top_p": 0.7}, [hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.7)]),
    ({"min_p": 0.02, "top_p": 0.8}, [hf.MinPLogitsWarper(0.02), hf.TopPLogitsWarper(0.8)]),
    (
        {"min_p": 0.01, "top_k": 9, "top_p": 0.9},
        [hf.MinPLogitsWarper(0.01), hf.TopKLogitsWarper(9), hf.TopPLogitsWarper(0.9)],
    ),
    ({}, []),
]


def expected_probabilities(logits: Tensor, temperature: float, warpers: list[Any]) -> Tensor:
    scores = hf.TemperatureLogitsWarper(temperature)(torch.empty(0), logits)
    for warper in warpers:
        scores = warper(torch.empty(0), scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("vocab_size", [60, 5000])
def test_filters_as_in_transformers(vocab_size: int, temperature: float) -> None:
    """All of them in one batch, so that rows with and without a filter, and with short and long heads, are mixed."""
    logits = random_logits(len(FILTERS), vocab_size)
    batch = batch_of([make(temperature=temperature, **params) for params, _ in FILTERS])
    weights = ((logits - logits.amax(1, keepdim=True)) / temperature).exp()
    filter_weights(weights, batch.min_p, batch.limits)
    for row, (params, warpers) in enumerate(FILTERS):
        want = expected_probabilities(logits[row : row + 1], temperature, warpers)[0]
        got = weights[row] / weights[row].sum()
        # transformers sums up in float32, so a share may end one token later or earlier there.
        assert want[(got > 0) != (want > 0)].sum() < 1e-5, params
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5), params


def test_a_share_that_rounds_to_everything() -> None:
    logits = random_logits(2, 5000)
    assert sample(logits, [make(top_p=1 - 1e-9)] * 2) == sample(logits, [make()] * 2)


@pytest.mark.parametrize("params", [[{}], [{"top_k": 7}], [{"top_k": 7, "top_p": 0.5, "min_p": 0.1}, {}], [{}, GREEDY]])
def test_tokens_are_drawn_before_the_host_waits(monkeypatch: pytest.MonkeyPatch, params: list[dict[str, Any]]) -> None:
    """The device "meta" computes all that is launched there, and refuses to give values."""
    drawn: list[Tensor] = []

    def spy(weights: Tensor, uniforms: Tensor) -> Tensor:
        drawn.append(draw(weights, uniforms))
        return drawn[-1]

    monkeypatch.setattr(sampler, "draw", spy)
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        sample(torch.empty(len(params), 5000, device="meta"), [make(**each) for each in params])
    assert drawn[-1].shape == (len([each for each in params if each is not GREEDY]),)


def test_repetition_penalty_as_in_transformers() -> None:
    logits = random_logits(3, 50)
    penalties = (1.3, 0.8, 1.0)
    requests = [
        make(prompt=random_tokens(9, 50, row), output=random_tokens(row, 50, row + 9), repetition_penalty=penalty)
        for row, penalty in enumerate(penalties)
    ]
    edited = logits.clone()
    batch_of(requests).edit(edited)
    for row, request in enumerate(requests):
        ids = torch.tensor([request.token_ids(0, request.num_tokens)])
        want = hf.RepetitionPenaltyLogitsProcessor(penalties[row])(ids, logits[row : row + 1].clone())
        assert torch.allclose(edited[row], want[0])


def test_bias_as_in_transformers() -> None:
    logits = random_logits(2, 20)
    biases = {5: 2.5, 7: -100.0}
    edited = logits.clone()
    batch_of([make(), make(logit_bias=biases)]).edit(edited)
    want = hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])(
        torch.zeros(2, 1, dtype=torch.int64), logits.clone()
    )
    assert torch.equal(edited[0], logits[0])
    assert torch.allclose(edited[1], want[1])


def test_allowed_tokens_as_in_transformers() -> None:
    logits = random_logits(2, 20)
    edited = logits.clone()
    batch_of([make(allowed_token_ids=[4, 9]), make()]).edit(edited)
    others = [token for token in range(20) if token not in (4, 9)]
    want = hf.SuppressTokensLogitsProcessor(others)(torch.empty(0), logits.clone())
    assert torch.equal(edited[0], want[0])
    assert torch.equal(edited[1], logits[1])


@pytest.mark.parametrize("output", [[], [4], [4, 5], [5, 4], [4, 5, 4, 5]])
def test_bad_words_as_in_transformers(output: list[int]) -> None:
    logits = random_logits(2, 20)
    bad = [[7], [4, 5, 6], [4, 5], [5, 9]]
    edited = logits.clone()
    batch_of([make(output=output, bad_words_ids=bad), make()]).edit(edited)
    processor = hf.NoBadWordsLogitsProcessor(bad, eos_token_id=3)
    want = processor(torch.tensor([[1, 1, 1, *output]]), logits[:1].clone())
    assert torch.equal(edited[0], want[0])
    assert torch.equal(edited[1], logits[1])


def test_many_bad_words_are_looked_at_by_the_last_token() -> None:
    words = BadWords([[1], [2], *([token, 7, 100 + token] for token in range(50)), [7, 8], [*[7] * 1000, 9]])
    assert words.alone == (1, 2)
    assert words.completed([]) == words.completed([7, 3]) == []
    assert words.completed([7]) == [8]
    assert words.completed([4, 7]) == [104, 8]
    assert words.completed([7] * 999) == [107, 8]
    assert words.completed([7] * 5000) == [107, 8, 9]
    assert not BadWords([])


@pytest.mark.parametrize("num_output", [0, 4, 5])
def test_minimum_length_as_in_transformers(num_output: int) -> None:
    logits = random_logits(2, 20)
    requests = [make(min_tokens=5, stop_token_ids=[8], output=[1] * num_output), make(min_tokens=5, ignore_eos=True)]
    batch = batch_of(requests)
    edited = logits.clone()
    if batch.edits():
        batch.edit(edited)
    ids = torch.ones(1, 1 + num_output, dtype=torch.int64)
    want = hf.MinNewTokensLengthLogitsProcessor(1, 5, [3, 8])(ids, logits[:1].clone())
    assert torch.equal(edited[0], want[0])
    # The end of the text is masked also where it is ignored, as in vLLM.
    want = hf.MinNewTokensLengthLogitsProcessor(1, 5, [3])(ids[:, :1], logits[1:].clone())
    assert torch.equal(edited[1], want[0])


def test_biases_of_few_tokens_and_of_most() -> None:
    vocab_size = 3000
    logits = random_logits(6, vocab_size)
    generator = torch.Generator().manual_seed(3)
    some: list[dict[int, float] | None] = [
        dict(zip(torch.randperm(vocab_size, generator=generator)[:count].tolist(), values, strict=True))
        for count in (1, 2900, 1024, 2)
        for values in [torch.randn(count, generator=generator).tolist()]
    ]
    some = [*some, None, some[1]]
    edited, want = logits.clone(), logits.clone()
    batch_of([make(logit_bias=each) for each in some]).edit(edited)
    for row, each in zip(want, some, strict=True):
        for token, bias in (each or {}).items():
            row[token] += bias
    assert torch.equal(edited, want)


def _counted(kind: type, read: list[type]) -> Any:
    """A type of collection that notes when an object of it is read."""

    def iterate(self: Any) -> Any:
        read.append(kind)
        return kind.__iter__(self)  # type: ignore[attr-defined]

    return type("Counted", (kind,), {"__iter__": iterate})


def test_what_parameters_hold_is_read_once_for_all_completions() -> None:
    """Each may have as many tokens as the vocabulary, and all completions have the same."""
    vocab_size, read = 3000, list[type]()
    sampling = SamplingParams(max_tokens=50, min_tokens=40, n=8)
    for name, kind, value in [
        ("allowed_token_ids", tuple, range(vocab_size)),
        ("logit_bias", dict, dict.fromkeys(range(vocab_size), 1.0)),
    ]:
        object.__setattr__(sampling, name, _counted(kind, read)(value))
    held = _counted(frozenset, read)(range(100, vocab_size))
    requests = [
        Request("r", [1], sampling, max_total_tokens=100, seed=seed, held_token_ids=held) for seed in range(sampling.n)
    ]
    sampler = Sampler()
    for count in (8, 8, 5, 7, 8):
        tokens = sampler.sample(random_logits(count, vocab_size), list(map(Row, requests[:count])))
        for request, token in zip(requests[:count], tokens, strict=True):
            assert token is not None
            assert token < 100
            request.output_token_ids.append(token)
    assert sorted(kind.__name__ for kind in read) == ["dict", "frozenset", "tuple"]


def naive_penalties(logits: Tensor, request: Request) -> Tensor:
    """vLLM's rules, one token at a time."""
    row, params = logits.clone(), request.sampling
    for token in set(request.token_ids(0, request.num_tokens)):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
        count = request.output_token_ids.count(token)
        row[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return row


def test_penalties_are_kept_up_to_date_while_requests_come_and_go() -> None:
    vocab_size = 12
    generator = torch.Generator().manual_seed(1)
    every = [
        make(seed=1, prompt=[3, 3, 5], temperature=0, frequency_penalty=0.7, presence_penalty=0.2),
        make(seed=2, temperature=0),
        make(seed=3, prompt=[7] * 9, temperature=0, repetition_penalty=1.5),
        make(seed=4, prompt=[0, 1], temperature=0, repetition_penalty=0.7, frequency_penalty=-0.3),
    ]
    sampler = Sampler()
    for step in range(250):
        present = every if step % 20 < 10 else [every[(step // 20 + i) % 4] for i in range(3)]
        logits = torch.randn(len(present), vocab_size, generator=generator)
        want = [int(naive_penalties(logits[i], request).argmax()) for i, request in enumerate(present)]
        before = logits.clone()
        tokens = sampler.sample(logits, list(map(Row, present)))
        assert tokens == want, f"step {step}"
        assert torch.equal(logits, before)
        for request, token in zip(present, tokens, strict=True):
            assert token is not None
            request.output_token_ids.append(token)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whatever_torch_computes_in_by_default(dtype: torch.dtype) -> None:
    """Logits are edited and drawn from in float32. Counts of a token would stop at 256 in bfloat16."""
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.05},
        {"logit_bias": {5: 2.5}},
        {"repetition_penalty": 1.3, "temperature": 0},
        {"frequency_penalty": 0.01, "temperature": 0},
    ]
    logits = torch.zeros(len(kinds), 300)
    logits[:, 7] = 3.5

    def tokens() -> list[list[int | None]]:
        requests = [make(seed=seed, **params) for seed, params in enumerate(kinds)]
        sampler = Sampler()
        for _ in range(400):
            for request, token in zip(requests, sampler.sample(logits, list(map(Row, requests))), strict=True):
                assert token is not None
                request.output_token_ids.append(token)
        return [list(request.output_token_ids) for request in requests]

    expected = tokens()
    assert expected[-1].count(7) > 350  # until its count takes 3.5 off
    torch.set_default_dtype(dtype)
    try:
        assert tokens() == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    count, logits = 8000, torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    requests = [make(temperature=temperature, seed=seed) for seed in range(count)]
    tokens = torch.tensor(sample(logits.expand(count, -1), requests))
    frequencies = torch.bincount(tokens, minlength=5) / count
    wanted = (logits / temperature).softmax(-1)
    assert torch.allclose(frequencies, wanted, atol=4 * math.sqrt(0.25 / count))


def test_draws_over_many_blocks_follow_the_distribution() -> None:
    weights = random_logits(1, 1024, 1.0).exp()
    weights[0, 100:700] = 0
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(weights.expand(count, -1).contiguous(), uniforms)
    frequencies = torch.bincount(tokens, minlength=1024) / count
    assert torch.allclose(frequencies, weights[0] / weights.sum(), atol=2 / count)
    assert tokens.tolist() == sorted(tokens.tolist())
    ends = draw(weights.expand(2, -1).contiguous(), torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ends.tolist() == [0, 1023]


def test_a_stream_of_random_numbers() -> None:
    numbers = uniform(np.repeat(np.arange(50, dtype=np.uint64), 400), np.tile(np.arange(400, dtype=np.uint64), 50))
    assert 0 <= numbers.min() <= numbers.max() < 1
    assert len(set(numbers.tolist())) == len(numbers)
    histogram, _ = np.histogram(numbers, bins=10)
    assert np.abs(histogram - 2000).max() < 4 * math.sqrt(2000)
    first = numbers.reshape(50, 400)[:, 0]
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.5


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    logits = random_logits(6, 100)
    alone = [sample(logits[i : i + 1], [make(seed=i)])[0] for i in range(6)]
    assert sample(logits, [make(seed=i) for i in range(6)]) == alone
    mixed = sample(logits, [make(temperature=i % 2, seed=i) for i in range(6)])
    assert mixed[1::2] == alone[1::2]
    assert mixed[::2] == logits.argmax(-1).tolist()[::2]
    filtered = sample(logits, [make(seed=i, **({"top_p": 0.5} if i % 2 else {})) for i in range(6)])
    assert filtered[::2] == alone[::2]
    assert alone != [sample(logits[i : i + 1], [make(seed=i + 100)])[0] for i in range(6)]


@pytest.mark.parametrize("temperature", [1e-30, 1e-320])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = 1e4 * random_logits(4, 30)
    assert sample(logits, [make(temperature=temperature) for _ in range(4)]) == logits.argmax(-1).tolist()


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((2000, 6), float("-inf"))
    logits[:, 2] = logits[:, 4] = 0.0
    assert set(sample(logits, [make(seed=seed) for seed in range(2000)])) == {2, 4}


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "every token -inf"])
def test_a_row_that_says_nothing_fails_alone(params: dict[str, Any], bad: float | str) -> None:
    logits = random_logits(3, 300)
    want = sample(logits, [make(seed=i, **params) for i in range(3)])
    if isinstance(bad, str):
        logits[1] = float("-inf")
    else:
        logits[1, 2] = bad
    tokens = sample(logits, [make(seed=i, **params) for i in range(3)])
    assert tokens == [want[0], None, want[2]]


def test_processors_of_transformers_see_the_tokens_and_change_the_logits() -> None:
    logits = random_logits(2, 300)
    prompt, output = random_tokens(9, 300, 1), random_tokens(6, 300, 2)
    processors = [hf.RepetitionPenaltyLogitsProcessor(1.7), hf.NoRepeatNGramLogitsProcessor(1)]
    want = logits[1:].clone()
    for processor in processors:
        want = processor(torch.tensor([prompt + output]), want)
    rows = [make(temperature=0), make(prompt=prompt, output=output, temperature=0, logits_processors=processors)]
    before = logits.clone()
    assert sample(logits, rows) == [int(logits[0].argmax()), int(want.argmax())]
    assert torch.equal(logits, before)


class _Raising(hf.LogitsProcessor):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        raise ZeroDivisionError("mine")


class _Giving(hf.LogitsProcessor):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self._change = change

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        return self._change(scores)


def _leave(_: Tensor) -> Tensor:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("processor", "error", "says"),
    [
        (_Raising(), ZeroDivisionError, "mine"),
        (_Giving(lambda scores: torch.cat([scores, scores], dim=1)), ValueError, r"logits_processors gave \[1, 600\]"),
        (_Giving(lambda _: None), ValueError, "logits_processors gave None; it has to return scores"),
        (_Giving(lambda scores: scores * math.nan), ValueError, r"logits_processors gave NaN or \+inf"),
        (_Giving(lambda scores: scores + math.inf), ValueError, r"logits_processors gave NaN or \+inf"),
        (_Giving(_leave), RuntimeError, "CancelledError"),
    ],
)
def test_a_processor_that_fails_fails_its_row(processor: hf.LogitsProcessor, error: type[Exception], says: str) -> None:
    logits = random_logits(3, 300)
    sampler = Sampler()
    rows = [Row(make(temperature=0)), Row(make(logits_processors=[processor])), Row(make(temperature=0))]
    tokens = sampler.sample(logits, rows)
    assert tokens == [int(logits[0].argmax()), None, int(logits[2].argmax())]
    assert list(sampler.failures) == [1]
    assert isinstance(sampler.failures[1], error)
    assert re.search(says, str(sampler.failures[1]))
    sampler.sample(logits[:1], rows[:1])
    assert not sampler.failures


def test_a_processor_answers_for_its_own_numbers_alone() -> None:
    """Not for NaN that a later one removes, nor for those of the model."""
    logits = random_logits(2, 300)
    logits[1] = math.nan
    processors = [_Giving(lambda scores: scores * math.nan), hf.InfNanRemoveLogitsProcessor()]
    sampler = Sampler()
    rows = [Row(make(temperature=0, logits_processors=processors)), Row(make(logits_processors=processors[:1]))]
    assert sampler.sample(logits, rows) == [0, None]
    assert not sampler.failures


def test_everything_excluded() -> None:
    request = make(allowed_token_ids=[3], min_tokens=2)
    assert sample(random_logits(2, 9), [request, make(temperature=0)])[0] is None
