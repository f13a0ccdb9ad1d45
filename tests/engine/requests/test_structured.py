"""What can be asked for as the form of an output."""

from __future__ import annotations

from typing import Any

import pytest

from vattn.engine import SamplingParams, StructuredOutputs
from vattn.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has nothing; give exactly one of json, regex, choice and grammar"),
        ({"json": {}, "regex": "a"}, "has json and regex; give exactly one"),
        ({"json": "{"}, "no JSON schema: Expecting property name"),
        ({"json": "[]"}, "is \\[\\]; a JSON schema is an object"),
        ({"json": {"enum": [object()]}}, "no JSON schema: Object of type object is not JSON serializable"),
        ({"json": {"minimum": float("nan")}}, "no JSON schema: Out of range float"),
        ({"json": "[" * 100_000}, "no JSON schema"),
        ({"json": True}, "is True; a JSON schema is an object"),
        ({"regex": 5}, "has the regex 5; give text"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"grammar": ["start: 'a'"]}, "has the grammar .*; give text"),
        ({"choice": "yes"}, "has the choice 'yes'; give a list of texts"),
        ({"choice": []}, "has the choice \\[\\]; give a list"),
        ({"choice": ["yes", ""]}, "has '' among its choices"),
        ({"choice": ["yes", 1]}, "has 1 among its choices"),
    ],
)
def test_one_form_of_the_right_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StructuredOutputs(**fields)


def test_sampling_parameters_take_a_mapping() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b", "a"]})
    assert params.structured_outputs == StructuredOutputs(choice=["a", "b"])
    for wrong, message in [
        ("a+", "structured_outputs is 'a\\+'; give StructuredOutputs, or a mapping"),
        ({"schema": {}}, "structured_outputs has no 'schema'; it has json, regex, choice, grammar"),
        ({}, "has nothing"),
    ]:
        with pytest.raises(ConfigError, match=message):
            SamplingParams(structured_outputs=wrong)  # type: ignore[arg-type]


def test_a_schema_is_stored_as_text_so_that_later_changes_do_not_matter() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    wanted = StructuredOutputs(json=schema)
    schema["type"] = "array"
    assert wanted.json == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert hash(wanted) == hash(StructuredOutputs(json=wanted.json))
