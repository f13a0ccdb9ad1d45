"""Flags from dataclasses: a field with a `Flag` is a flag, under the same name, with the same default.

A flag that was not given leaves no attribute behind, so a command knows what its user asked for, and the defaults stay
where they are: in the dataclass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import vattn
from vattn.engine.config import EngineConfig, Flag
from vattn.errors import ConfigError
from vattn.layout import LayoutName
from vattn.units import parse_bytes

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

# The model that ships with the project, and that commands run when no other is named.
SHIPPED_MODEL = Path(vattn.__file__).parent / "demo_model"


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


def add_model(parser: argparse.ArgumentParser, help: str = "path or hub id") -> None:
    """Add the positional `MODEL`, which may be left out."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{help}; default: the one that ships with vattn")


def chosen_model(model: str | None) -> str:
    """The model that was named, or the one that ships with the project, which is said on stderr.

    Raises:
        ConfigError: none was named, and this installation has none.
    """
    if model is not None:
        return model
    if not (SHIPPED_MODEL / "config.json").exists():
        raise ConfigError(
            f"no MODEL was given, and the one that ships with vattn is not at {SHIPPED_MODEL}; give a path or hub id"
        )
    print(f"vattn: no MODEL was given: running {SHIPPED_MODEL}, the one that ships with vattn", file=sys.stderr)
    return str(SHIPPED_MODEL)


# The engine.


def _page_size(text: str) -> int | str:
    try:
        return text if text == "auto" else parse_bytes(text, "page_size")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True)
class _BackendFlag:
    """A flag that only the backend `kv` has; `key` is its name in `kv_options`, None for a field of the engine."""

    kv: str
    key: str | None
    flag: Flag | None = None


# By `dest`.
_BACKEND_FLAGS = {
    "block_size": _BackendFlag("paged", None),
    "num_blocks": _BackendFlag(
        "paged",
        "num_blocks",
        Flag(help="blocks in the pool of --kv paged; default: what the cache's size holds", parse=int),
    ),
    "page_size": _BackendFlag(
        "virtual",
        "page_size",
        Flag(help="bytes of a page of --kv virtual, text such as 64KiB, or auto", parse=_page_size, metavar="SIZE"),
    ),
    "kv_layout": _BackendFlag(
        "virtual",
        "layout",
        Flag(
            help="tensors of --kv virtual: a K and a V tensor per layer, the same for all layers, or one for all",
            choices=("auto", *get_args(LayoutName)),
        ),
    ),
}
_BOTH = ("virtual", "paged")


def add_engine_flags(
    parser: argparse.ArgumentParser, *, both: bool = False, changed: Mapping[str, Any] | None = None
) -> None:
    """Add the flags of `EngineConfig`, and those that become its `kv_options`.

    Args:
        both: whether `--kv both` runs two backends.
    """
    group = parser.add_argument_group("engine")
    add_fields(group, EngineConfig, changed=changed)
    if both:
        kv = next(action for action in group._group_actions if action.dest == "kv")
        kv.choices = (*(kv.choices or ()), "both")
    for dest, option in _BACKEND_FLAGS.items():
        if option.flag is not None:
            flag = option.flag
            group.add_argument(
                "--" + dest.replace("_", "-"),
                dest=dest,
                default=argparse.SUPPRESS,
                type=flag.parse,
                choices=flag.choices,
                metavar=flag.metavar,
                help=flag.help,
            )


def chosen_backends(args: argparse.Namespace) -> tuple[str, ...]:
    """The KV backends that were asked for: two for `--kv both`."""
    kv: str = getattr(args, "kv", EngineConfig.kv)
    return _BOTH if kv == "both" else (kv,)


def engine_options(args: argparse.Namespace, kv: str | None = None) -> dict[str, Any]:
    """The keywords of `LLM` that were given, without the model.

    Args:
        kv: one of `chosen_backends`, where a command runs several.

    Raises:
        ConfigError: a flag of a backend that was not asked for, or one that `--kv-options` contradicts.
    """
    backends = chosen_backends(args)
    for dest, option in _BACKEND_FLAGS.items():
        if hasattr(args, dest) and option.kv not in backends:
            raise ConfigError(
                f"--{dest.replace('_', '-')} is an option of --kv {option.kv}, not of --kv {' or '.join(backends)}; "
                f"leave it out, or give --kv {option.kv}"
            )
    kv = kv or backends[0]
    options = {**given(args, EngineConfig), "kv": kv}
    mine = {dest: option for dest, option in _BACKEND_FLAGS.items() if option.kv == kv and hasattr(args, dest)}
    others = [dest for dest, option in _BACKEND_FLAGS.items() if option.key is None and option.kv != kv]
    for dest in others:
        options.pop(dest, None)
    flags = {option.key: getattr(args, dest) for dest, option in mine.items() if option.key is not None}
    if flags:
        named = options.get("kv_options") or {}
        twice = sorted(flags.keys() & named.keys())
        if twice:
            raise ConfigError(f"--kv-options and a flag of its own both give {', '.join(twice)}; give it once")
        options["kv_options"] = {**named, **flags}
    return options


def given_engine_flags(args: argparse.Namespace, but: Iterable[str] = ()) -> list[str]:
    """The flags of the engine that were given, with their dashes, but for those of the fields `but`."""
    names = {field.name: flag_name(field, flag) for field, flag in flagged(EngineConfig).items()}
    names |= {dest: "--" + dest.replace("_", "-") for dest in _BACKEND_FLAGS}
    return [name for dest, name in names.items() if hasattr(args, dest) and dest not in but]


# Sampling.


_SAMPLING = {
    "max_tokens": Flag(help="maximum number of output tokens", parse=int),
    "min_tokens": Flag(help="minimum number of output tokens", parse=int),
    "temperature": Flag(help="0 is greedy", parse=float),
    "top_p": Flag(help="share of probability to sample from", parse=float),
    "top_k": Flag(help="tokens to sample from; 0 for all", parse=int),
    "min_p": Flag(help="least probability, as a share of the largest", parse=float),
    "presence_penalty": Flag(help="taken off the logit of every token that the output has", parse=float),
    "frequency_penalty": Flag(help="taken off once for each time that the output has a token", parse=float),
    "repetition_penalty": Flag(help="divides the logit of every token of prompt or output", parse=float),
}


def add_sampling_flags(parser: argparse.ArgumentParser, *, temperature: float, max_tokens: int) -> None:
    """Add the flags of `SamplingParams`, with the defaults of this command."""
    group = parser.add_argument_group("sampling")
    defaults: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    for name, flag in _SAMPLING.items():
        help = flag.help + (f" (default: {defaults[name]})" if name in defaults else "")
        group.add_argument("--" + name.replace("_", "-"), type=flag.parse, default=argparse.SUPPRESS, help=help)
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="text that ends the output; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="continue to --max-tokens")
    parser.set_defaults(sampling=defaults)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given, over the defaults of the command."""
    names = (*_SAMPLING, "stop", "ignore_eos", "seed")
    return {**args.sampling, **{name: getattr(args, name) for name in names if hasattr(args, name)}}
