"""What can be asked for as the form of an output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vattn.engine import SamplingParams, StructuredOutputs
from vattn.errors import ConfigError

STRUCTURE = {"begin": "<f=x>", "schema": {"type": "integer"}, "end": "</f>"}
TAG = {"type": "structural_tag", "triggers": ["<f"], "structures": [STRUCTURE]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has nothing; give exactly one of json, regex, choice, grammar, json_object, structural_tag"),
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
        ({"json_object": False}, "has the json_object False; give True"),
        ({"json_object": 1}, "has the json_object 1; give True"),
        ({"json_object": True, "json": {}}, "has json and json_object; give exactly one"),
        ({"structural_tag": "{"}, "the structural_tag of structured_outputs is no JSON: Expecting"),
        ({"structural_tag": 5}, "is 5; give a mapping with triggers and structures"),
        ({"structural_tag": {"triggers": ["<f"]}}, "give a mapping with triggers and structures"),
        ({"structural_tag": {**TAG, "at_least_one": True}}, "give a mapping with triggers and structures"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "has a format, which is not supported"),
        ({"structural_tag": {**TAG, "triggers": [""]}}, r"has the triggers \[''\]; give a list of texts"),
        ({"structural_tag": {**TAG, "triggers": ["<g"]}}, "has the structure '<f=x>', which begins with no trigger"),
        ({"structural_tag": {**TAG, "structures": []}}, "give a list of at least one"),
        ({"structural_tag": {**TAG, "structures": [{"begin": "<f"}]}}, "give one with begin, schema and end"),
        ({"structural_tag": {**TAG, "structures": [{**STRUCTURE, "end": 5}]}}, "its begin and end are texts"),
        ({"structural_tag": {**TAG, "structures": [{**STRUCTURE, "schema": "x"}]}}, "a JSON schema is an object"),
        ({"structural_tag": "\ud800"}, "no JSON"),
    ],
)
def test_one_form_of_the_right_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StructuredOutputs(**fields)


def test_sampling_parameters_take_a_mapping() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b", "a"]})
    assert params.structured_outputs == StructuredOutputs(choice=["a", "b"])
    unset = {"json": None, "whitespace_pattern": None, "disable_any_whitespace": False}  # as `asdict` of vLLM's
    assert SamplingParams(structured_outputs={**unset, "choice": ["a", "b"]}) == params
    for wrong, message in [
        ("a+", "structured_outputs is 'a\\+'; give StructuredOutputs, or a mapping"),
        (
            {"schema": {}},
            "structured_outputs has no 'schema'; it has json, regex, choice, grammar, json_object, struct",
        ),
        ({"choice": ["a"], "disable_any_whitespace": True}, "structured_outputs has no 'disable_any_whitespace'"),
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


def test_a_structural_tag_is_stored_as_text() -> None:
    wanted = StructuredOutputs(structural_tag=TAG)
    assert wanted == StructuredOutputs(structural_tag=json.dumps(TAG))
    assert hash(wanted) == hash(StructuredOutputs(structural_tag=json.dumps(TAG)))
