"""`vattn store`: what is in a store of prefixes, and deleting it. No torch: it starts at once."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from vattn.errors import ConfigError

from .flags import Commands


def add_to(commands: Commands, help: str) -> None:
    """Add `store` and its commands."""
    parser = commands.add_parser("store", help=help)
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def add(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help)
        action.set_defaults(run=run)
        action.add_argument("folder", metavar="PATH", help="the store, as in --kv-store")
        return action

    add("list", _list, "how much of which model is there, and when it was used last")
    trim = add("trim", _trim, "delete what was used longest ago; engines may be running")
    trim.add_argument("--to", required=True, metavar="SIZE", help="what may stay: 50GiB")
    add("clear", _clear, "delete all of it; engines may be running")


def _list(args: argparse.Namespace) -> int:
    from vattn.units import format_bytes

    sizes: dict[tuple[str, str], int] = defaultdict(int)
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    used: dict[tuple[str, str], int] = defaultdict(int)
    for entry in _open(args.folder).entries():
        head = entry.head()
        if head is not None:
            # A model may have been stored by several engines whose values differ.
            of = head.label, head.fingerprint.hex()[:8]
            sizes[of] += entry.size
            tokens[of] += head.num_tokens
            used[of] = max(used[of], entry.used_ns)
    for of in sorted(sizes, key=lambda of: -used[of]):
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(used[of] / 1e9))
        print(f"{of[0]} ({of[1]}): {format_bytes(sizes[of])}, {tokens[of]:,} tokens, used last {last}")
    if not sizes:
        print("nothing is stored")
    return 0


def _trim(args: argparse.Namespace) -> int:
    from vattn.units import parse_bytes

    return _shrink(args.folder, parse_bytes(args.to, "--to"))


def _clear(args: argparse.Namespace) -> int:
    return _shrink(args.folder, 0)


def _shrink(folder: str, most_bytes: int) -> int:
    from vattn.units import format_bytes

    store = _open(folder)
    freed = store.trim(most_bytes)
    print(f"{format_bytes(freed)} deleted; {format_bytes(store.bytes)} left")
    return 0


def _open(folder: str) -> Any:
    from vattn.store.folder import PrefixStore

    if not folder or not Path(folder).expanduser().is_dir():
        raise ConfigError(f"there is no store {folder!r}; name the folder that --kv-store names")
    return PrefixStore(folder)
