"""A pool, its caches and their models: makes calls, keeps the script of them, and compares."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from faults import FaultyTable

import vattn
from tests.campaign import contents
from tests.campaign.model import Model, Piece
from vattn import _native


class Found(Exception):
    """Something that must not be.

    Attributes:
        kind: what, without numbers: shrinking keeps to it.
        code: Python that shows it at the end of the script, where there is more to show than an error.
    """

    def __init__(self, kind: str, detail: str, code: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.code = code


class Refused(Exception):
    """A call raised an error that may come there, and changed nothing."""


class Stopped(Exception):
    """The pool refuses to go on, and may: the scenario ends here."""


@dataclass(frozen=True)
class Call:
    """A call on the public interface.

    Attributes:
        code: an expression.
        into: names that take what it returns, in the script.
        expected: errors that may come.
    """

    code: str
    into: str = ""
    expected: tuple[type[BaseException], ...] = ()

    @property
    def name(self) -> str:
        """The method."""
        found = re.search(r"\bc\d+\.(\w+)\(", self.code)
        return found[1] if found else self.code


@dataclass(frozen=True)
class Config:
    """What a scenario runs on.

    Attributes:
        pool_pages: pages of 4 KiB in the pool.
        caches: options of `vattn.KVConfig` and of its groups, `{"groups": [{...}, ...], ...}`.
        table: driver calls pass through a table that can make them fail.
        every: operations between two checks.
        fail: the nth driver call fails, once the caches are made, with that code: (nth, code).
        drop: the caches are not closed in the end, but dropped.
        delay: seconds that every driver call takes longer once the caches are made, so that the worker lags behind;
            with a table.
    """

    pool_pages: int
    caches: tuple[dict[str, Any], ...]
    table: bool = False
    every: int = 1
    fail: tuple[int, int] | None = None
    drop: bool = False
    delay: float = 0.0


@dataclass
class CacheUnderTest:
    name: str
    cache: vattn.KVCache
    model: Model
    context: int
    guard_rows: int
    slots: int
    block: int
    arrays: dict[tuple[int, int], Any] = field(default_factory=dict)


def make_config(options: dict[str, Any]) -> vattn.KVConfig:
    """What `config_code` is an expression of."""
    groups = [vattn.TensorGroup(**group) for group in options["groups"]]
    return vattn.KVConfig(**options | {"groups": groups})


def config_code(options: dict[str, Any]) -> str:
    """Options as an expression."""
    plain = {name: value for name, value in options.items() if name != "groups"}
    groups = ", ".join(
        f"vattn.TensorGroup({', '.join(f'{k}={v!r}' for k, v in group.items())})" for group in options["groups"]
    )
    return f"vattn.KVConfig(groups=[{groups}], {', '.join(f'{k}={v!r}' for k, v in plain.items())})"


def tokens_code(pieces: list[Piece]) -> str:
    return " + ".join(f"text{piece}" for piece in pieces) or "[]"


class World:
    """What a scenario acts on; a context manager, whose end closes everything and looks for what was left."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.names: dict[str, Any] = {"vattn": vattn, "np": np, "torch": torch, "text": contents.text}
        self.lines: list[str] = []
        self.calls = 0
        self.failures = 0  # of driver calls, that callers were told of
        self.counts: Counter[str] = Counter()
        self.before_call: Callable[[], object] | None = None
        self.table: FaultyTable | None = None
        if config.drop:
            gc.collect()  # what is left of earlier worlds does not count
        self._before = usage()
        table = ""
        if config.table:
            self.table = FaultyTable()
            self.names["table"] = self.table
            self.lines.append("table = FaultyTable()")
            table = ", table=table.addresses"
        self._exec(f"pool = vattn.PagePool({config.pool_pages * 4096}, page_size=4096{table})")
        self.pool: vattn.PagePool = self.names["pool"]
        self.caches: list[CacheUnderTest] = []
        try:
            for i, options in enumerate(config.caches):
                self._exec(f"c{i} = vattn.KVCache({config_code(options)}, pool=pool)")
                self.caches.append(self._known(f"c{i}", options))
        except BaseException:
            self.close()
            raise
        if config.fail is not None:
            self._exec(f"table.fail{config.fail}")
        if config.delay:
            self._exec(f"table.delay = {config.delay}")

    def _exec(self, line: str) -> None:
        self.lines.append(line)
        exec(line, self.names)

    def _known(self, name: str, options: dict[str, Any]) -> CacheUnderTest:
        cache: vattn.KVCache = self.names[name]
        windows = {layer: group.get("sliding_window") for group in options["groups"] for layer in group["layers"]}
        known = CacheUnderTest(
            name,
            cache,
            Model(windows),
            options["max_context_len"],
            options.get("guard_rows", 0),
            options["max_batch_size"],
            cache.prefix_block_tokens,
        )
        known.arrays = contents.sides(cache)
        return known

    # Calls

    def call(self, made: Call) -> Any:
        """Makes a call.

        Raises:
            Refused: it raised an error that may come, and left the books as they were.
            Found: another error, or books that changed.
        """
        self.calls += 1
        line = f"{made.into} = {made.code}" if made.into else made.code
        compiled = compile(made.code, "<campaign>", "eval")
        where = len(self.lines)
        self.lines.append(line)

        self.counts[made.name] += 1
        if self.before_call is not None:
            self.before_call()
        try:
            return eval(compiled, self.names)
        except Exception as error:
            kind = type(error).__name__
            changed = self._changed()
            if not isinstance(error, (vattn.VattnError, *made.expected)):
                also = ", after it changed lengths" if changed else ""
                raise Found(f"untyped {kind} from {made.name}{also}", f"{error} {changed}") from error
            if not isinstance(error, made.expected) and not self._injected(error):
                raise Found(f"unexpected {kind} from {made.name}", str(error)) from error
            self.lines[where] = f"try: {made.code}\nexcept {'vattn.' * hasattr(vattn, kind)}{kind}: pass"
            self.counts[kind] += 1
            if changed:
                raise Found(
                    f"{kind} from {made.name} changed lengths",
                    changed,
                    "print('DEFECT: the call that failed changed lengths', c0.page_map())",
                ) from error
            raise Refused from error

    def _changed(self) -> str:
        """What the lengths are instead of the model's; empty if they are those."""
        for each in self.caches:
            if (found := self.lengths(each)) != (expected := each.model.lengths()):
                return f"{each.name}: {found} instead of {expected}"
        return ""

    def _injected(self, error: Exception) -> bool:
        if self.table is None or self.table.failed is None:
            return False
        self.table.failed = None  # it counts once
        self.failures += 1
        return isinstance(error, vattn.DriverError) or isinstance(error.__cause__, vattn.DriverError)

    @staticmethod
    def lengths(each: CacheUnderTest) -> dict[int, int]:
        return {pages.reqid: pages.length for pages in each.cache.page_map() if pages.active}

    # Contents

    def put(self, each: CacheUnderTest, label: int, firsts: dict[int, int]) -> None:
        """Writes the rows that a step was made for."""
        request, slot = each.model.requests[label], each.model.slots[label]
        tokens = tokens_code(request.upto(request.length))
        self.lines.append(f"put({each.name}, r{label}, {tokens}, {request.salt!r}, {firsts})")
        end = request.length
        for (layer, side), array in each.arrays.items():
            first = firsts[layer]
            if first < end:
                if not contents.writable(array, slot, first, end):
                    raise Found("rows of a step cannot be written", f"{each.name} slot {slot}, rows {first} to {end}")
                array[slot, first:end] = request.rows((layer, side), first, end, array.shape[2:])

    def see(self, each: CacheUnderTest, label: int, upto: int | None = None) -> None:
        """Compares every row of a request that queries may see, or those before `upto`."""
        request, slot = each.model.requests[label], each.model.slots[label]
        firsts = each.model.firsts(request)
        end = request.length if upto is None else min(upto, request.length)
        for (layer, side), array in each.arrays.items():
            first = firsts[layer]
            if first >= end:
                continue
            found = array[slot, first:end]
            expected = request.rows((layer, side), first, end, array.shape[2:])
            if (found != expected).any():
                wrong = (np.flatnonzero((found != expected).any(axis=(1, 2))) + first).tolist()
                tokens = tokens_code(request.upto(end))
                raise Found(
                    "wrong rows",
                    f"{each.name}, request {label} in slot {slot}, layer {layer}, {'KV'[side]}, rows {wrong} of {end}",
                    f"see({each.name}, r{label}, {tokens}, {request.salt!r}, {firsts})",
                )

    def check(self, *, rows: bool = True) -> None:
        """Compares everything."""
        with self.table.transparent() if self.table else contextlib.nullcontext():
            held = 0
            for each in self.caches:
                if rows:
                    try:
                        each.cache.check()
                    except Exception as error:
                        raise Found("check()", f"{type(error).__name__}: {error}", f"{each.name}.check()") from error
                held += self._compare(each)
                if rows:
                    for label in each.model.requests:
                        self.see(each, label)
            if rows and (total := held + self.pool.free_pages) != self.pool.total_pages:
                raise Found("pages are not conserved", f"{held} held, {self.pool.free_pages} free, {total} in all")

    def _compare(self, each: CacheUnderTest) -> int:
        model = each.model
        if (found := self.lengths(each)) != model.lengths():
            raise Found("lengths", f"{found} instead of {model.lengths()}", f"print({each.name}.page_map())")
        stats = each.cache.stats()
        expected = (sum(r.length for r in model.requests.values()), model.query_tokens, model.hit_tokens)
        if (counted := (stats.live_tokens, stats.query_tokens, stats.hit_tokens)) != expected:
            raise Found("tokens are miscounted", f"{counted} instead of {expected}", f"print({each.name}.stats())")
        if not 0 <= stats.waste <= 1:
            raise Found("waste is no share", f"{stats.waste}", f"assert 0 <= {each.name}.stats().waste <= 1, 'DEFECT'")
        parts = (stats.owned_pages, stats.parked_pages, stats.cached_pages, stats.other_pages, stats.free_pages)
        if min(parts) < 0 or sum(parts) != stats.budget_pages or stats.shared_pages > stats.owned_pages:
            raise Found("stats do not add up", f"{stats}", f"print({each.name}.stats())")
        return stats.mapped_pages

    # The end

    def close(self) -> None:
        """Closes what is open."""
        if self.table is not None:
            self.table.heal()
        for each in self.caches:
            each.arrays.clear()
            each.cache.close()
        self.pool.close()

    def _end(self) -> None:
        """Closes or drops everything, and looks for what is left."""
        if self.table is not None:
            self.table.heal()
        if not self.config.drop:
            try:
                self.close()
            except Exception as error:
                raise Found("close()", f"{type(error).__name__}: {error}", _CLOSE) from error
            left = usage()
            if (left.physical_bytes, left.handles) != (self._before.physical_bytes, self._before.handles):
                raise Found("memory is left behind caches that were closed", f"{self._before} -> {left}", _CLOSE)
            return
        names = [each.name for each in self.caches]
        left_alive = weakref.WeakSet(each.cache for each in self.caches)
        self.names.clear()
        self.caches.clear()
        del self.pool
        self.before_call = None
        gc.collect()
        left = usage()
        if left.threads > self._before.threads:
            time.sleep(0.1)  # the kernel lists a thread for a moment after it was joined
            left = usage()
        if left_alive or left != self._before:
            raise Found(
                "a dropped cache is not collected",
                f"{len(left_alive)} of {len(names)} are alive, {self._before} -> {left}",
                f"import gc, weakref\n\nref = weakref.ref(c0)\ndel {', '.join(names)}, pool\ngc.collect()\n"
                "assert ref() is None, 'DEFECT: still alive'",
            )

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._end()
        else:
            with contextlib.suppress(BaseException):
                self.close()


@dataclass(frozen=True)
class Usage:
    """What the process holds."""

    kernel_mappings: int
    physical_bytes: int
    handles: int
    reservations: int
    threads: int


def usage() -> Usage:
    """What the process holds now."""
    held = _native.host_usage()
    threads = len(os.listdir("/proc/self/task"))
    return Usage(held.kernel_mappings, held.physical_bytes, held.handles, held.reservations, threads)


_CLOSE = "c0.close()\npool.close()\nfrom vattn import _native\nprint(_native.host_usage().physical_bytes)"
