"""Bodies: what is too large is refused before it takes time and memory, and what is wrong is told."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from vattn.engine.server.bodies import has_more_values, parse
from vattn.engine.server.errors import ApiError


def values(value: Any) -> int:
    """All values, names of fields included; an empty list or object counts as two."""
    if isinstance(value, dict):
        return 1 + sum(1 + values(member) for member in value.values()) + (not value)
    if isinstance(value, list):
        return 1 + sum(map(values, value)) + (not value)
    return 1


def random_value(rng: random.Random, depth: int = 0) -> Any:
    texts = ["", "a", ",,,", "[{", '"', "\\", '\\"', "\\\\", "\n,:", "é,", "x" * 70_000, "\\" * 65_535, '",' * 40_000]
    kind = rng.randrange(6 if depth < 3 else 3)
    if kind == 0:
        return rng.choice([1, -2.5, None, True])
    if kind <= 2:
        return rng.choice(texts)
    if kind == 3:
        return {rng.choice(texts) + str(i): random_value(rng, depth + 1) for i in range(rng.randrange(5))}
    return [random_value(rng, depth + 1) for _ in range(rng.randrange(6))]


def test_values_are_counted_as_they_are() -> None:
    """Whatever texts hold, and wherever the stretches that are searched end."""
    rng = random.Random(1)
    for _ in range(400):
        value = random_value(rng)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=rng.choice([None, (",", ":")])).encode()
        assert not has_more_values(body, values(value))
        assert has_more_values(body, values(value) - 1) is True


@pytest.mark.parametrize(
    "body",
    [
        b'"' * 1_000_000,
        b'"a"' * 400_000,
        b"[" * 1_000_000,
        b'"' + b"\\" * 1_000_001,
        b'["' + b',"\\"' * 300_000,
        b"," * 1_000_000,
        b'"' + b'\\",' * 300_000,
    ],
    ids=range(7),
)
def test_what_is_no_json_is_refused_all_the_same(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, 1000)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": NaN}', "the body has NaN, which JSON does not have"),
        (b'{"a": [1, -Infinity]}', "the body has -Infinity"),
        (b'{"a": ' + b"1" * 641 + b"}", "a whole number of 641 digits; it can have at most 640"),
        (b'{"a": "\xff"}', "the body is no UTF-8, at byte 7"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"a": 1', "the body is no JSON: Expecting ',' delimiter, at character 7"),
        (b"", "the body is no JSON"),
        (b"[" + b"1," * 200_000 + b"1]", "the body has more than 200000 values"),
    ],
    ids=range(8),
)
def test_what_is_wrong_is_told(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, 200_000)
    assert message in str(caught.value)


def test_what_is_right_is_read() -> None:
    digits = "7" * 5000
    body = {"text": f",{digits}", "numbers": [1, -2.5, 10**600, 1e300], "nothing": None, "é": {"a": [[]]}}
    assert parse(json.dumps(body).encode(), 30) == body
    assert parse(b"\xef\xbb\xbf" + json.dumps(body, ensure_ascii=False).encode(), 30) == body
