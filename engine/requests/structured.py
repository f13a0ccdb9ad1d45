"""`StructuredOutputs`: the form that an output must have; names and meanings as in vLLM."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vattn.engine.checks import check_encodable
from vattn.errors import ConfigError
from vattn.integers import shown


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
        grammar: a context-free grammar in llguidance's dialect of Lark, with a rule `start`.

    Raises:
        ConfigError: none or several of them, or a value of the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of json, regex, choice "
                "and grammar"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None:
                if not isinstance(text, str):
                    raise ConfigError(f"structured_outputs has the {name} {shown(text)}; give text")
                check_encodable(f"the {name} of structured_outputs", text, ConfigError)

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """`value`, or what a mapping with these keys stands for.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(value, cls):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"structured_outputs is {shown(value)}; give StructuredOutputs, or a mapping of its fields"
            )
        if unknown := [key for key in value if key not in names]:
            raise ConfigError(f"structured_outputs has no {shown(unknown[0])}; it has {', '.join(names)}")
        return cls(**value)


def _schema(schema: object) -> str:
    """A JSON schema as text."""
    try:
        text = schema if isinstance(schema, str) else json_text.dumps(schema, allow_nan=False)
        parsed = json_text.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the json of structured_outputs is no JSON schema: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"the json of structured_outputs is {shown(parsed)}; a JSON schema is an object")
    check_encodable("the json of structured_outputs", text, ConfigError)
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Sequence) or not choices:
        raise ConfigError(f"structured_outputs has the choice {shown(choices)}; give a list of texts")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ConfigError(
                f"structured_outputs has {shown(choice)} among its choices; give texts, none of them empty"
            )
        check_encodable("a choice of structured_outputs", choice, ConfigError)
    return tuple(dict.fromkeys(choices))
