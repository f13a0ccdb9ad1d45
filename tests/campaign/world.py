"""A pool, its caches and block windows, and their models: makes calls, keeps the script of them, and compares."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

import vattn
from tests.campaign import blocks, books, contents
from tests.campaign.blocks import BlockModel
from tests.campaign.model import Model, Piece, Request
from tests.support.faults import FaultyTable
from vattn import _native
from vattn.drivers import host
from vattn.pool import leftovers

_CHECKS_OF_BOOKS = 20  # one in so many compares what /proc says as well


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
        refused: one of them must come.
    """

    code: str
    into: str = ""
    expected: tuple[type[BaseException], ...] = ()
    refused: bool = False

    @property
    def name(self) -> str:
        """The method, or the class that is made."""
        found = re.search(r"\b(?:[bc]\d+|vattn)\.(\w+)\(", self.code)
        return found[1] if found else self.code


@dataclass(frozen=True)
class Config:
    """What a scenario runs on.

    Attributes:
        pool_pages: pages in the pool, of `page_size` bytes.
        caches: options of `vattn.KVConfig` and of its groups, `{"groups": [{...}, ...], ...}`.
        windows: options of `vattn.BlockWindows`.
        zero_on_free: of the pool; caches have an option of their own.
        guard: of the pool.
        own: caches and windows have pools of their own, and nothing draws on the world's.
        table: driver calls pass through a table that can make them fail.
        every: operations between two checks, which wait for the worker: with many, it lags behind.
        fail: the nth driver calls fail, once the caches are made, with these codes: (nth, code).
        drop: the caches are not closed in the end, but dropped.
        delay: seconds that every driver call takes longer once the caches are made, so that the worker lags behind;
            with a table.
        books: what /proc says is compared too, in a few of the checks and in the end.
    """

    pool_pages: int
    caches: tuple[dict[str, Any], ...] = ()
    windows: tuple[dict[str, Any], ...] = ()
    page_size: int = 4096
    zero_on_free: bool = False
    guard: str = "zero"
    own: bool = False
    table: bool = False
    every: int = 1
    fail: tuple[tuple[int, int], ...] = ()
    drop: bool = False
    delay: float = 0.0
    books: bool = False


@dataclass
class CacheUnderTest:
    """A cache; None after it was dropped. Its model is empty from its close on."""

    name: str
    options: dict[str, Any]
    cache: vattn.KVCache | None
    model: Model
    block: int
    open: bool = True
    arrays: dict[tuple[int, int], Any] = field(default_factory=dict)

    @property
    def it(self) -> vattn.KVCache:
        assert self.cache is not None
        return self.cache

    @property
    def context(self) -> int:
        return int(self.options["max_context_len"])

    @property
    def guard_rows(self) -> int:
        return int(self.options.get("guard_rows", 0))

    @property
    def slots(self) -> int:
        return int(self.options["max_batch_size"])

    @property
    def zeroes(self) -> bool:
        return bool(self.options.get("zero_on_free", False))


@dataclass
class WindowsUnderTest:
    """Block windows; None after they were dropped. Their model is empty from their close on."""

    name: str
    options: dict[str, Any]
    windows: vattn.BlockWindows | None
    model: BlockModel
    open: bool = True
    homes: list[Any] = field(default_factory=list)  # per layer `[blocks, tokens, bytes]`
    shown: list[Any] = field(default_factory=list)  # per layer `[windows, tokens, bytes]`

    @property
    def it(self) -> vattn.BlockWindows:
        assert self.windows is not None
        return self.windows


@dataclass
class Kept:
    """Memory that somebody holds on to, whatever happens to its owner.

    Attributes:
        arrays: as of a `CacheUnderTest`, or the homes or windows of a `WindowsUnderTest` by layer.
        owner: what keeps the memory mapped as long as the arrays exist; None if nothing does.
        requests: per slot, what it held when its owner was dropped, and the first rows that may be seen; None before.
        over: the owner was closed, or dropped without anybody keeping its memory.
    """

    source: CacheUnderTest | WindowsUnderTest
    arrays: dict[Any, Any]
    owner: weakref.ref[Any] | None
    requests: list[tuple[int, Request, dict[int, int]]] | None = None
    over: bool = False


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


def cache_code(options: dict[str, Any], config: Config) -> str:
    """A cache, as an expression."""
    return f"vattn.KVCache({config_code(options)}{'' if config.own else ', pool=pool'})"


def windows_code(options: dict[str, Any], config: Config) -> str:
    """Block windows, as an expression."""
    pool = f"page_size={config.page_size}, guard={config.guard!r}" if config.own else "pool=pool"
    return f"vattn.BlockWindows({', '.join(f'{k}={v!r}' for k, v in options.items())}, {pool})"


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
        self.kept: list[Kept] = []
        self.stamp = 0
        self.lags = False  # between two of `Lag`
        if config.drop or config.books:
            gc.collect()  # what is left of earlier worlds does not count
        self._before = usage()
        self._books = books.read() if config.books else None
        self._checks = 0
        options = f", page_size={config.page_size}"
        options += ", zero_on_free=True" * config.zero_on_free + ", guard='strict'" * (config.guard == "strict")
        if config.table:
            self.table = FaultyTable()
            self.names["table"] = self.table
            self.lines.append("table = FaultyTable()")
            options += ", table=table.addresses"
        self.run(f"pool = vattn.PagePool({config.pool_pages * config.page_size}{options})")
        self.pool: vattn.PagePool = self.names["pool"]
        self.caches: list[CacheUnderTest] = []
        self.windows: list[WindowsUnderTest] = []
        try:
            for i, each in enumerate(config.caches):
                self.run(f"c{i} = {cache_code(each, config)}")
                self.caches.append(self.known_cache(f"c{i}", each))
            for i, each in enumerate(config.windows):
                self.run(f"b{i} = {windows_code(each, config)}")
                self.windows.append(self.known_windows(f"b{i}", each))
        except BaseException:
            self.close()
            raise
        if config.fail:
            self.run(f"table.fail_several{config.fail}")
        if config.delay:
            self.run(f"table.delay = {config.delay}")

    def run(self, line: str) -> None:
        """Executes a line, which the script of a finding has, too."""
        self.lines.append(line)
        exec(line, self.names)

    def known_cache(self, name: str, options: dict[str, Any]) -> CacheUnderTest:
        """A cache that was just made, with its model."""
        cache: vattn.KVCache = self.names[name]
        windows = {layer: group.get("sliding_window") for group in options["groups"] for layer in group["layers"]}
        known = CacheUnderTest(name, options, cache, Model(windows), cache.prefix_block_tokens)
        known.arrays = contents.sides(cache)
        return known

    def known_windows(self, name: str, options: dict[str, Any]) -> WindowsUnderTest:
        """Block windows that were just made, with their model."""
        windows: vattn.BlockWindows = self.names[name]
        size, context = options["block_size"], options["max_context_len"]
        model = BlockModel(
            options["num_blocks"],
            size,
            options["num_windows"],
            -(-context // size),
            options["num_layers"],
            self.config.zero_on_free and not self.config.own,
        )
        known = WindowsUnderTest(name, options, windows, model)
        known.homes = [contents.flat(windows.home(layer)) for layer in range(model.layers)]
        known.shown = [contents.flat(windows.window(layer)) for layer in range(model.layers)]
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
            value = eval(compiled, self.names)
        except Exception as error:
            kind = type(error).__name__
            injected = self._injected(error)
            changed = self._changed()
            if not isinstance(error, (vattn.VattnError, *made.expected)):
                also = ", after it changed lengths" if changed else ""
                raise Found(f"untyped {kind} from {made.name}{also}", f"{error} {changed}") from error
            if not isinstance(error, made.expected) and not injected:
                raise Found(f"unexpected {kind} from {made.name}", str(error)) from error
            self.lines[where] = f"try: {made.code}\nexcept {'vattn.' * hasattr(vattn, kind)}{kind}: pass"
            self.counts[kind] += 1
            if changed:
                raise Found(
                    f"{kind} from {made.name} changed lengths or rows",
                    changed,
                    "print('DEFECT: the call that failed changed this', c0.page_map())",
                ) from error
            raise Refused from error
        if made.refused:
            raise Found(f"{made.name} is not refused", f"{made.code} returned {value!r}")
        return value

    def _changed(self) -> str:
        """What lengths, and rows of windows, are instead of the models'; empty if they are those."""
        try:
            with self.quiet():
                for each in self.caches:
                    if (found := self.lengths(each)) != (expected := each.model.lengths()):
                        return f"{each.name}: {found} instead of {expected}"
                for windows in self.windows:
                    if windows.open and (changed := self.changed(windows)):
                        return changed
        except vattn.CacheClosed as error:
            return f"closed in part: {error}"
        return ""

    def changed(self, each: WindowsUnderTest) -> str:
        """Where block windows are not what their model says; empty if nowhere."""
        if (backed := each.it.backed()) != set(each.model.contents):
            return f"{each.name}: {sorted(backed)} are backed instead of {sorted(each.model.contents)}"
        for window, row in each.model.rows:
            if (shown := each.it.shown(window))[: len(row)] != row:
                return f"{each.name}: window {window} shows {shown} instead of {row}"
        return ""

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Driver calls made within do not fail."""
        return self.table.transparent() if self.table else contextlib.nullcontext()

    def look(self, ask: Callable[[], Any]) -> Any:
        """What a call that only looks returns; once more where a driver call failed it."""
        try:
            return ask()
        except vattn.DriverError as error:
            if not self._injected(error):
                raise
            with self.quiet():
                return ask()

    def _injected(self, error: Exception) -> bool:
        if self.table is None or (self.table.failed is None and self.pool._core.usable):
            return False
        self.table.failed = None  # it counts once, but for a pool that a cache left meanwhile
        self.failures += 1
        # OutOfPages as well: pages that were to go in the background and are back are missing elsewhere.
        failures = vattn.DriverError | vattn.OutOfPages
        return isinstance(error, failures) or isinstance(error.__cause__, vattn.DriverError)

    @staticmethod
    def lengths(each: CacheUnderTest) -> dict[int, int]:
        if not each.open:
            return {}
        return {pages.reqid: pages.length for pages in each.it.page_map() if pages.active}

    # Lives

    def ended(self, each: CacheUnderTest | WindowsUnderTest, *, dropped: bool) -> None:
        """A cache, or block windows, was closed or dropped: its model is empty, and what somebody kept of it is what
        that promises.
        """
        held = [kept for kept in self.kept if kept.source is each and not kept.over and kept.requests is None]
        owned = dropped and any(kept.owner is not None for kept in held)
        for kept in held:
            if owned:
                assert isinstance(each, CacheUnderTest)
                kept.requests = [
                    (each.model.slots[label], request.copy(), each.model.firsts(request))
                    for label, request in each.model.requests.items()
                ]
            else:
                kept.over = True
        each.open = False
        if isinstance(each, CacheUnderTest):
            each.arrays = {}
            each.model = Model(each.model.windows)
            if dropped:
                each.cache = None
        else:
            each.homes, each.shown = [], []
            each.model.contents, each.model.rows = {}, []
            if dropped:
                each.windows = None
        if dropped:
            del self.names[each.name]

    def forget(self, which: Callable[[Kept], bool]) -> None:
        """Kept tensors go, and with the last that owned a dropped cache what others see of it."""
        self.kept = [kept for kept in self.kept if not which(kept)]
        owned = [kept.source for kept in self.kept if kept.owner is not None]
        for kept in self.kept:
            if kept.requests is not None and all(kept.source is not each for each in owned):
                kept.requests, kept.over = None, True

    def see_kept(self) -> None:
        """Compares what somebody kept beyond its owner's end."""
        for kept in self.kept:
            if kept.over:
                for array in kept.arrays.values():
                    if self.config.guard == "zero" and array.any():
                        raise Found("memory is seen behind its owner's end", f"of {kept.source.name}")
                    wide = array if array.ndim == 4 else array[:, :, None]
                    if contents.writable(wide, 0, 0, 1):
                        raise Found("memory can be written behind its owner's end", f"of {kept.source.name}")
            for slot, request, firsts in kept.requests or ():
                for side, array in kept.arrays.items():
                    first, end = firsts[side[0]], request.length
                    expected = request.rows(side, first, end, array.shape[2:]) if first < end else None
                    if expected is not None and (array[slot, first:end] != expected).any():
                        raise Found(
                            "wrong rows in tensors that outlive their cache", f"{kept.source.name}, slot {slot}"
                        )

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

    def see_zeros(self, each: CacheUnderTest, label: int, end: int, firsts: dict[int, int] | None = None) -> None:
        """Where ended requests leave zeros, the rows that a request never wrote, before `end`, are none of theirs.

        Args:
            firsts: by layer, the first row that is backed, where reading others is a fault.
        """
        request, slot = each.model.requests[label], each.model.slots[label]
        if not each.zeroes or not request.stepped:
            return
        for (layer, side), array in each.arrays.items():
            first = max(request.reached, firsts[layer] if firsts else 0)
            if first < end and (found := array[slot, first:end]).any():
                rows = (np.flatnonzero(found.any(axis=(1, 2))) + first).tolist()
                raise Found(
                    "rows of another request",
                    f"{each.name}, request {label} in slot {slot}, layer {layer}, {'KV'[side]}, rows {rows}",
                    f"k = {each.name}.layer({layer})[{side}][r{label}, {first}:{end}]\n"
                    "assert not k.view(torch.uint8).any(), 'DEFECT: rows of another request'",
                )

    def see_blocks(self, each: WindowsUnderTest) -> None:
        """Compares blocks at home, and what every window shows."""
        model = each.model
        if changed := self.changed(each):
            raise Found("blocks or windows", changed, f"print({each.name}.backed(), {each.name}.stats())")
        for layer, home in enumerate(each.homes):
            for block, held in model.contents.items():
                made, known = blocks.expected(held, layer, home.shape[2])
                if (home[block] != made)[known].any():
                    raise Found("wrong rows at home", f"{each.name}, layer {layer}, block {block}")
        stats = each.it.stats()
        total = 0
        for window in range(model.num_windows):
            shown = each.it.shown(window)
            total += len(shown)
            if lost := [block for block in shown if block not in model.contents]:
                raise Found("a window shows blocks without memory", f"{each.name}, window {window}: {lost}")
            for layer, array in enumerate(each.shown):
                end = len(shown) * model.block_size
                if shown:
                    held = np.concatenate([model.contents[block] for block in shown])
                    made, known = blocks.expected(held, layer, array.shape[2])
                    if (array[window, :end] != made)[known].any():
                        raise Found("wrong rows in a window", f"{each.name}, layer {layer}, window {window}: {shown}")
                    if contents.writable(array[:, :, None], window, 0, 1):
                        raise Found("a window can be written", f"{each.name}, window {window}")
                if self.config.guard == "zero" and array[window, end:].any():
                    raise Found("something is seen past the blocks of a window", f"{each.name}, window {window}")
        counted = (stats.backed_blocks, stats.shown_blocks, stats.attached_blocks - stats.detached_blocks)
        if counted != (len(model.contents), total, total):
            raise Found("blocks are miscounted", f"{counted} instead of {len(model.contents)}, {total} and {total}")

    def check(self) -> None:
        """Compares everything; waits for the worker, of which driver calls may fail until then."""
        if self.table is not None:
            mapper = self.pool._core.worker.mapper
            mapper.wait(mapper.last)
        with self.quiet():
            if self.pool._core in leftovers.holding:  # what was dropped while a driver call failed
                self.pool._core.take_back()
            held = 0
            for each in self.caches:
                if each.open:
                    self._check(each)
                    held += self._compare(each)
                    for label in each.model.requests:
                        self.see(each, label)
                        if self.config.guard == "zero":
                            self.see_zeros(each, label, each.context)
            for windows in self.windows:
                if windows.open:
                    self._check(windows)
                    self.see_blocks(windows)
                    held += len(windows.model.contents) * windows.it.stats().block_bytes // self.config.page_size
            for kept in self.kept:
                orphan = kept.owner() if kept.owner is not None and kept.requests is not None else None
                if orphan is not None and all(orphan is not each.cache for each in self.caches):
                    held += orphan.stats().mapped_pages if self._first(kept, orphan) else 0
            self.see_kept()
            held *= not self.config.own
            if (total := held + self.pool.free_pages) != self.pool.total_pages:
                raise Found("pages are not conserved", f"{held} held, {self.pool.free_pages} free, {total} in all")
            # The kernel looks at every page for this, which takes longer than all the rest.
            if self._books is not None and self._checks % _CHECKS_OF_BOOKS == 0 and (wrong := books.disagreement()):
                raise Found("the kernel's books say otherwise", wrong)
            self._checks += 1

    def _first(self, kept: Kept, orphan: Any) -> bool:
        """Whether this is the first that somebody keeps of a cache."""
        return next(each for each in self.kept if each.owner is not None and each.owner() is orphan) is kept

    def _check(self, each: CacheUnderTest | WindowsUnderTest) -> None:
        try:
            each.it.check()
        except Exception as error:
            raise Found("check()", f"{type(error).__name__}: {error}", f"{each.name}.check()") from error

    def _compare(self, each: CacheUnderTest) -> int:
        model = each.model
        if (found := self.lengths(each)) != model.lengths():
            raise Found("lengths", f"{found} instead of {model.lengths()}", f"print({each.name}.page_map())")
        stats = each.it.stats()
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
        for each in (*self.caches, *self.windows):
            if each.open:
                each.it.close()
                self.ended(each, dropped=False)
        self.forget(lambda kept: kept.owner is not None and not kept.over)  # these keep caches open
        self.pool.close()
        self._give_back()

    def _end(self) -> None:
        """Closes or drops everything, and looks for what is left."""
        if self.table is not None:
            self.table.heal()
        if self.config.drop:
            self._drop()
        else:
            self.see_kept()
            try:
                self.close()
            except Exception as error:
                raise Found("close()", f"{type(error).__name__}: {error}", _CLOSE) from error
            self.see_kept()
            self.kept.clear()
        self.before_call = None
        if self.counts["interrupts"]:
            gc.collect()  # frames that an interrupt left refer to each other
        if left := self._left():
            how = "dropped and not collected" if self.config.drop else "closed"
            raise Found(f"something is left of caches that were {how}", left, _CLOSE)

    def _drop(self) -> None:
        """Drops everything, then what was kept of it."""
        alive: weakref.WeakSet[Any] = weakref.WeakSet()
        for each in (*self.caches, *self.windows):
            if each.open:
                alive.add(each.it)
                self.ended(each, dropped=True)
        names = sorted(name for name in self.names if re.fullmatch(r"[bc]\d+", name))
        self.names.clear()
        self.caches.clear()
        self.windows.clear()
        del self.pool
        gc.collect()
        self.see_kept()
        self.kept.clear()
        gc.collect()
        self._give_back()
        if alive:
            raise Found(
                "a dropped cache is not collected",
                f"{len(alive)} are alive",
                f"import gc, weakref\n\nref = weakref.ref(c0)\ndel {', '.join([*names, 'c0', 'pool'])}\ngc.collect()\n"
                "assert ref() is None, 'DEFECT: still alive'",
            )

    def _give_back(self) -> None:
        """What could not be given back, because driver calls failed, goes when the next memory is made; before the
        table goes.
        """
        if self.config.fail:
            driver = host.HostDevice().open(4096)
            _native.AddressSpace(driver.native, _native.PagePool(4096, 1), tensors=1, slots=1, runs=1, run_pages=1)

    def _left(self) -> str:
        """What the process holds beyond what it held before; empty if nothing."""
        return left(self._before) or (books.left(self._books) if self._books is not None else "")

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


def left(before: Usage) -> str:
    """What the process holds beyond that; empty if nothing. A thread of what was there before may end meanwhile."""
    end = time.monotonic() + 2
    while replace(now := usage(), threads=max(now.threads, before.threads)) != before:
        if time.monotonic() > end:
            names = [each.name for each in fields(Usage)]
            changed = [name for name in names if getattr(before, name) != getattr(now, name)]
            return ", ".join(f"{name}: {getattr(before, name)} -> {getattr(now, name)}" for name in changed)
        time.sleep(0.001)  # the kernel lists a thread for a moment after it was joined
    return ""


_CLOSE = "c0.close()\npool.close()\nfrom vattn import _native\nprint(_native.host_usage())"
