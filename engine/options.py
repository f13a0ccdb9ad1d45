"""An option is stated once: as a field of a dataclass, with what it means and how the command line offers it.

Signatures, flags, docstrings and the tables of the reference follow from these fields.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_S = TypeVar("_S")
_C = TypeVar("_C")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field means, and how the command line offers it; a bool becomes a switch.

    Attributes:
        doc: for every reader, from the command line's help to the reference; Markdown without links.
        flag: its name on the command line, without dashes; None for the field's own, "" for a field that is no flag.
        parse: from text to the field's type.
        choices: the only values, where they are few.
        metavar: what stands for the value in the help.
    """

    doc: str
    flag: str | None = None
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None

    @property
    def help(self) -> str:
        """`doc` for a terminal, through argparse."""
        return self.doc.replace("`", "").replace("%", "%%")


def option(default: Any, doc: str, **how: Any) -> Any:
    """A field of a dataclass; `how` are attributes of its `Option`."""
    return field(default=default, metadata={"option": Option(doc=doc, **how)})


def json_value(text: str) -> Any:
    """Raises a ValueError for what is no JSON."""
    return json.loads(text)


json_value.__name__ = "JSON"  # what argparse calls it in its errors


def options_of(settings: type) -> dict[str, Option]:
    """The options of a dataclass, in order, by the names of their fields."""
    return {each.name: each.metadata["option"] for each in fields(settings) if "option" in each.metadata}


def takes_options_of(
    settings: Callable[_P, object],
) -> Callable[[Callable[Concatenate[_S, ...], None]], Callable[Concatenate[_S, _P], None]]:
    """For an `__init__` that hands all its arguments to a dataclass: it has the dataclass's signature, and refuses
    other names.
    """
    signature = inspect.signature(settings.__init__)

    def decorate(init: Callable[Concatenate[_S, ...], None]) -> Callable[Concatenate[_S, _P], None]:
        @functools.wraps(init)
        def checked(self: _S, /, *args: _P.args, **keywords: _P.kwargs) -> None:
            for name in keywords.keys() - signature.parameters.keys():
                near = difflib.get_close_matches(name, signature.parameters, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}{hint}")
            init(self, *args, **keywords)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def documents_options_of(settings: type) -> Callable[[type[_C]], type[_C]]:
    """For a class that takes the options of a dataclass: they begin the sections of its docstring."""

    def decorate(kind: type[_C]) -> type[_C]:
        lines = []
        for name, each in options_of(settings).items():
            lines += textwrap.wrap(
                f"{name}: {each.doc}.", 112, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False
            )
        begin, _, rest = (kind.__doc__ or "").partition("\n\n")
        kind.__doc__ = "\n".join([begin, "", "    Args:", *lines, "", rest])
        return kind

    return decorate
