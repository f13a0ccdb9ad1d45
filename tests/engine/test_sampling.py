"""Greedy and temperature sampling: distribution, seeds, extremes, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from engine import SamplingParams
from engine.request import Request
from engine.sampling import sample
from vattn.errors import ConfigError


def make(temperature: float, seed: int = 0) -> Request:
    params = SamplingParams(temperature=temperature)
    return Request("r", [1], params, max_total_tokens=9, seed=seed)


def test_greedy_takes_the_largest() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [make(0)] * 5) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    count, logits = 8000, torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    request = make(temperature, seed=3)
    tokens = torch.tensor(sample(logits.expand(count, -1), [request] * count))
    frequencies = torch.bincount(tokens, minlength=5) / count
    wanted = (logits / temperature).softmax(-1)
    assert torch.allclose(frequencies, wanted, atol=4 * math.sqrt(0.25 / count))


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    alone = [sample(logits[i : i + 1], [make(1.0, seed=i)])[0] for i in range(6)]
    assert sample(logits, [make(1.0, seed=i) for i in range(6)]) == alone
    mixed = sample(logits, [make(1.0 if i % 2 else 0.0, seed=i) for i in range(6)])
    assert mixed[1::2] == alone[1::2]
    assert mixed[::2] == logits.argmax(-1).tolist()[::2]
    assert alone != [sample(logits[i : i + 1], [make(1.0, seed=i + 100)])[0] for i in range(6)]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = 1e4 * torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [make(1e-30)] * 4) == logits.argmax(-1).tolist()


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((2000, 6), float("-inf"))
    logits[:, 2] = logits[:, 4] = 0.0
    assert set(sample(logits, [make(1.0)] * 2000)) == {2, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(temperature: float, bad: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, [make(temperature)] * 2)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": 2**64}, "64 bits"),
    ],
)
def test_bad_parameters(keywords: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**keywords)  # type: ignore[arg-type]
