"""`StructuredOutputs`: the form that an output must have; names and meanings as in vLLM."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vattn.errors import ConfigError
from vattn.integers import shown

from ..checks import check_encodable

_PARAM = "structured_outputs"
_TAG_KEYS = {"type", "triggers", "structures"}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form that an output must have: exactly one of these.

    The output has it when it ends by itself, with finish reason "stop". One that `max_tokens` cuts off, or a stop
    string, is the beginning of such an output.

    Attributes:
        json: a JSON schema, as a mapping or as text; stored as text. Objects have their properties in the schema's
            order. Keywords that cannot be enforced are refused when the request is made. Whitespace is a space, or a
            line break and an indentation of at most 32.
        regex: a regular expression for the whole output, in the syntax of Rust's `regex`: no look-around, no
            back-references.
        choice: texts, one of which is the output.
        grammar: a context-free grammar in llguidance's dialect of Lark, with a rule `start`; or in EBNF as llama.cpp
            writes it (GBNF), with `::=` and a rule `root`.
        json_object: True for any JSON object.
        structural_tag: any text, in which some tags enclose JSON of a schema: `{"triggers": ["<f="], "structures":
            [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}]}`, as a mapping or as text; stored as text. Once a
            trigger is written, one of the tags that begin with it follows. vLLM's other kind, with a `format`, is
            refused.

    Raises:
        ConfigError: none or several of them, or a value of the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise _wrong(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of {', '.join(names)}"
            )
        if self.json_object is not None and self.json_object is not True:
            raise _wrong(f"structured_outputs has the json_object {shown(self.json_object)}; give True")
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _tags(self.structural_tag))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None:
                if not isinstance(text, str):
                    raise _wrong(f"structured_outputs has the {name} {shown(text)}; give text")
                check_encodable(f"the {name} of structured_outputs", text, ConfigError, _PARAM)

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """`value`, or what a mapping with these keys stands for; others may be there as None or False, options unset.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(value, cls):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise _wrong(f"structured_outputs is {shown(value)}; give StructuredOutputs, or a mapping of its fields")
        given = {key: each for key, each in value.items() if key in names or (each is not None and each is not False)}
        if unknown := [key for key in given if key not in names]:
            raise _wrong(f"structured_outputs has no {shown(unknown[0])}; it has {', '.join(names)}")
        return cls(**given)


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param=_PARAM)


def _both(value: object) -> tuple[str, Any]:
    """JSON as text, and as what the text says; it is given as either of them."""
    if isinstance(value, str):
        return value, json_text.loads(value)
    return json_text.dumps(value, allow_nan=False), value


def _schema(schema: object) -> str:
    """A JSON schema as text."""
    try:
        text, parsed = _both(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"the json of structured_outputs is no JSON schema: {error}") from None
    if not isinstance(parsed, dict):
        raise _wrong(f"the json of structured_outputs is {shown(parsed)}; a JSON schema is an object")
    check_encodable("the json of structured_outputs", text, ConfigError, _PARAM)
    return text


def _tags(given: object) -> str:
    """A structural tag as text."""
    what = "the structural_tag of structured_outputs"
    try:
        text, found = _both(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"{what} is no JSON: {error}") from None
    check_encodable(what, text, ConfigError, _PARAM)
    if isinstance(found, dict) and "format" in found:
        raise _wrong(f"{what} has a format, which is not supported; give triggers and structures")
    if not isinstance(found, dict) or not {"triggers", "structures"} <= found.keys() <= _TAG_KEYS:
        raise _wrong(f"{what} is {shown(found)}; give a mapping with triggers and structures")
    triggers, structures = found["triggers"], found["structures"]
    if not isinstance(triggers, list | tuple) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _wrong(f"{what} has the triggers {shown(triggers)}; give a list of texts, none of them empty")
    if not isinstance(structures, list | tuple) or not structures:
        raise _wrong(f"{what} has the structures {shown(structures)}; give a list of at least one")
    for structure in structures:
        if not isinstance(structure, dict) or structure.keys() != {"begin", "schema", "end"}:
            raise _wrong(f"{what} has the structure {shown(structure)}; give one with begin, schema and end")
        if not isinstance(structure["begin"], str) or not isinstance(structure["end"], str):
            raise _wrong(f"{what} has the structure {shown(structure)}; its begin and end are texts")
        if not isinstance(structure["schema"], dict):
            raise _wrong(f"{what} has the schema {shown(structure['schema'])}; a JSON schema is an object")
        if not any(structure["begin"].startswith(trigger) for trigger in triggers):
            raise _wrong(f"{what} has the structure {shown(structure['begin'])}, which begins with no trigger")
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Sequence) or not choices:
        raise _wrong(f"structured_outputs has the choice {shown(choices)}; give a list of texts")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise _wrong(f"structured_outputs has {shown(choice)} among its choices; give texts, none of them empty")
        check_encodable("a choice of structured_outputs", choice, ConfigError, _PARAM)
    return tuple(dict.fromkeys(choices))
