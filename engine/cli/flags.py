"""Flags from dataclasses: an option is a flag, under the same name, with the same default.

A flag that was not given leaves no attribute behind, so a command knows what its user asked for, and the defaults stay
where they are: in the dataclass.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from ..options import Option, options_of

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """States the default of every flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def flagged(settings: type) -> dict[str, Option]:
    """The options of a dataclass that the command line offers, in order, by the names of their fields."""
    return {name: each for name, each in options_of(settings).items() if each.flag != ""}


def flag_name(name: str, option: Option) -> str:
    """The flag of a field, with its dashes."""
    return "--" + (option.flag or name).replace("_", "-")


def add_fields(parser: argparse._ActionsContainer, settings: type, *, changed: Mapping[str, Any] | None = None) -> None:
    """Add the flags of a dataclass. A field that holds several values is a flag that may be repeated.

    Args:
        changed: defaults of the command that differ from the dataclass's, by field, for the help.
    """
    for field in fields(settings):
        if (option := flagged(settings).get(field.name)) is None:
            continue
        default = {field.name: field.default, **(changed or {})}[field.name]
        help = option.help
        how: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if isinstance(default, bool) or str(field.type).startswith("bool"):
            how["action"] = argparse.BooleanOptionalAction if field.default or default else "store_true"
        else:
            how |= {"type": option.parse, "choices": option.choices, "metavar": option.metavar}
            if isinstance(default, tuple):
                how["action"] = "append"
                help += "; may be repeated"
        if default is not None and default is not False and default not in ("", ()):
            help += f" (default: {default})"
        parser.add_argument(flag_name(field.name, option), help=help, **how)


def given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The fields of a dataclass that were given as flags."""
    values = {name: getattr(args, name) for name in flagged(settings) if hasattr(args, name)}
    # A flag that may be repeated collects a list.
    return {
        name: tuple(value) if isinstance(getattr(settings, name), tuple) else value for name, value in values.items()
    }
