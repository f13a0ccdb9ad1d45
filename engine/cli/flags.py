"""Flags from dataclasses: a field with a `Flag` is a flag, under the same name, with the same default.

A flag that was not given leaves no attribute behind, so a command knows what its user asked for, and the defaults stay
where they are: in the dataclass.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from ..config import Flag

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """States the default of every flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def flagged(settings: type) -> dict[Field[Any], Flag]:
    """The fields of a dataclass that the command line offers, in order."""
    return {each: each.metadata["flag"] for each in fields(settings) if "flag" in each.metadata}


def flag_name(field: Field[Any], flag: Flag) -> str:
    """The flag of a field, with its dashes."""
    return "--" + (flag.name or field.name).replace("_", "-")


def default_of(field: Field[Any]) -> Any:
    """What the field holds unless it is given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def add_fields(parser: argparse._ActionsContainer, settings: type, *, changed: Mapping[str, Any] | None = None) -> None:
    """Add the flags of a dataclass. A field that holds several values is a flag that may be repeated.

    Args:
        changed: defaults of the command that differ from the dataclass's, by field, for the help.
    """
    for field, flag in flagged(settings).items():
        default = {field.name: default_of(field), **(changed or {})}[field.name]
        help = flag.help.replace("%", "%%")
        how: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if isinstance(default, bool) or str(field.type).startswith("bool"):
            how["action"] = argparse.BooleanOptionalAction if default else "store_true"
        else:
            how |= {"type": flag.parse, "choices": flag.choices, "metavar": flag.metavar}
            if isinstance(default, list | tuple):
                how["action"] = "append"
                help += "; may be repeated"
        if default is not None and default is not False and default not in ("", (), []):
            help += f" (default: {default})"
        parser.add_argument(flag_name(field, flag), help=help, **how)


def given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The fields of a dataclass that were given as flags."""
    values = {field: getattr(args, field.name) for field in flagged(settings) if hasattr(args, field.name)}
    return {
        field.name: tuple(value) if isinstance(default_of(field), tuple) else value for field, value in values.items()
    }
