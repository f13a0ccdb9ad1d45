"""`vattn pool`: the broker of a pool, and what its operator sees and changes. No torch: it starts at once."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from contextlib import closing
from typing import Any

from vattn.errors import ConfigError, VattnError

from .flags import Commands

_SETTLING = 2.0  # seconds for borrowers to give back what they were asked for


def add_to(commands: Commands, help: str) -> None:
    """Add `pool` and its commands."""
    parser = commands.add_parser("pool", help=help)
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def add(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help)
        action.set_defaults(run=run)
        if name != "list":
            action.add_argument("pool", metavar="NAME", help="the pool")
        return action

    serve = add("serve", _serve, "keep the books of a pool, until SIGTERM; engines join it by its name")
    serve.add_argument("--budget", required=True, metavar="SIZE", help="memory of all caches together: 48GiB")
    serve.add_argument("--device", default="cpu", help="of the memory: cpu, or cuda:0; default: cpu")
    top = add("top", _top, "who has what of a pool; refreshes on a terminal")
    top.add_argument("--once", action="store_true", help="print once")
    top.add_argument("--json", action="store_true", help="print JSON, once")
    limit = add("limit", _limit, "change the share of a borrower; what it has to give up, it gives up by preemption")
    limit.add_argument("borrower", metavar="BORROWER", help="as top shows it")
    limit.add_argument("--at-least", metavar="SIZE", help="what it can always have; 0 for nothing")
    limit.add_argument("--at-most", metavar="SIZE", help="the most that it can have")
    trim = add("trim", _trim, "take back memory that no request and no cached prefix uses")
    evict = add("evict", _evict, "take back cached prefixes, too")
    for action in (trim, evict):
        action.add_argument("--model", metavar="BORROWER", help="of one borrower, as top shows it; default: of all")
    add("check", _check, "compare the broker's books with what the kernel says")
    add("list", _list, "the pools of this user")


def _serve(args: argparse.Namespace) -> int:
    from vattn.broker.server import serve
    from vattn.units import format_bytes, parse_bytes

    budget = parse_bytes(args.budget, "--budget")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve(
        args.pool,
        budget,
        device=args.device,
        ready=lambda broker: print(f"the pool {args.pool}: {format_bytes(budget)}, at {broker.path}", flush=True),
    )
    return 0


def _ask(pool: str, kind: str, **fields: object) -> dict[str, Any]:
    from vattn.broker.control import Control

    with closing(Control(pool)) as control:
        return control.ask(kind, **fields)


def _top(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(_ask(args.pool, "top"), indent=1))
        return 0
    while True:
        text = "\n".join(table(_ask(args.pool, "top")))
        if args.once or not sys.stdout.isatty():
            print(text)
            return 0
        print(f"\x1b[H\x1b[2J{text}", flush=True)
        time.sleep(1)


def table(top: dict[str, Any]) -> list[str]:
    """What `vattn pool top` prints, of the broker's answer."""
    from vattn.units import format_bytes

    sizes = ("at_least", "at_most", "lease", "owned", "parked", "cached", "shared", "asked", "asked_back")
    header = (
        "borrower",
        "guaranteed",
        "at most",
        "lent",
        "used",
        "parked",
        "cached",
        "shared",
        "asked back",
        "given back",
    )
    rows = [
        [each["name"] + (" (lost)" if each["lost"] else ""), *(format_bytes(each[size]) for size in sizes)]
        for each in top["borrowers"]
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    kept = f", {format_bytes(top['kept'])} cached of engines that have ended" if top["kept"] else ""
    free = f"{format_bytes(top['budget'])}, {format_bytes(top['free'])} free"
    lines = [f"{top['pool']} on {top['device']}: {free}{kept}", ""]
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _limit(args: argparse.Namespace) -> int:
    from vattn.units import parse_bytes

    if args.at_least is None and args.at_most is None:
        raise ConfigError("give --at-least, --at-most or both")
    least = None if args.at_least is None else 0 if args.at_least == "0" else parse_bytes(args.at_least, "--at-least")
    most = None if args.at_most is None else parse_bytes(args.at_most, "--at-most")
    print("\n".join(table(_ask(args.pool, "limit", name=args.borrower, at_least=least, at_most=most))))
    return 0


def _trim(args: argparse.Namespace) -> int:
    return _reclaim(args, "parked")


def _evict(args: argparse.Namespace) -> int:
    return _reclaim(args, "cached")


def _reclaim(args: argparse.Namespace, stage: str) -> int:
    from vattn.units import format_bytes

    before = _ask(args.pool, "top")["free"]
    top = _ask(args.pool, "reclaim", name=args.model, stage=stage)
    deadline = time.monotonic() + _SETTLING
    while any(each["asked"] for each in top["borrowers"]) and time.monotonic() < deadline:
        time.sleep(0.02)
        top = _ask(args.pool, "top")
    print(f"{format_bytes(max(0, top['free'] - before))} given back; {format_bytes(top['free'])} free")
    return 0


def _check(args: argparse.Namespace) -> int:
    problems = _ask(args.pool, "check")["problems"]
    print("\n".join(problems) or "books and kernel agree")
    return 1 if problems else 0


def _list(args: argparse.Namespace) -> int:
    from vattn.broker.control import summary
    from vattn.broker.places import folder, pools

    for name in pools():
        try:
            top = _ask(name, "top")
        except ConfigError:
            print(f"{name}: its broker has ended")
        except VattnError as error:
            print(f"{name}: {error}")
        else:
            print(f"{name}: {summary(top)}")
    if not list(pools()):
        print(f"no pools in {folder()}")
    return 0
