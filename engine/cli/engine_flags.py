"""Flags of the commands that run an engine: its configuration, the options of its backends, the model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from vattn.errors import ConfigError
from vattn.layout import LayoutName
from vattn.units import parse_bytes

from ..config import EngineConfig
from ..options import Option
from ..shipped_model import shipped_model
from .flags import add_fields, flag_name, flagged, given


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
    shipped = shipped_model()
    print(f"vattn: no MODEL was given: running {shipped}, the one that ships with vattn", file=sys.stderr)
    return shipped


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
    option: Option | None = None


# By `dest`.
_BACKEND_FLAGS = {
    "block_size": _BackendFlag("paged", None),
    "num_blocks": _BackendFlag(
        "paged",
        "num_blocks",
        Option(doc="blocks in the pool, for `paged`; by default what the cache's size holds", parse=int),
    ),
    "paged_windows": _BackendFlag(
        "paged",
        "windows",
        Option(
            doc="show the blocks of `paged` to kernels as contiguous memory, backed on demand (experimental)",
            parse=bool,
        ),
    ),
    "page_size": _BackendFlag(
        "virtual",
        "page_size",
        Option(doc="bytes of a page of `virtual`, text such as `64KiB`, or `auto`", parse=_page_size, metavar="SIZE"),
    ),
    "kv_layout": _BackendFlag(
        "virtual",
        "layout",
        Option(
            doc="which tensors hold the cache of `virtual`: a K and a V tensor per layer, the same for all layers, or "
            "one for all",
            choices=("auto", *get_args(LayoutName)),
        ),
    ),
}
_BOTH = ("virtual", "paged")


def engine_flags() -> dict[str, Option]:
    """What `add_engine_flags` adds, by `dest`."""
    return flagged(EngineConfig) | {dest: each.option for dest, each in _BACKEND_FLAGS.items() if each.option}


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
        if (flag := option.option) is not None:
            how: dict[str, Any] = {"type": flag.parse, "choices": flag.choices, "metavar": flag.metavar}
            if flag.parse is bool:
                how = {"action": "store_true"}
            group.add_argument(
                "--" + dest.replace("_", "-"), dest=dest, default=argparse.SUPPRESS, help=flag.help, **how
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
    names = {name: flag_name(name, option) for name, option in engine_flags().items()}
    return [name for dest, name in names.items() if hasattr(args, dest) and dest not in but]
