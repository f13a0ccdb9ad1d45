"""What a scenario runs on, and which operations: drawn from a seed and from what the model knows, from nothing that the
cache answers, so that the same seed draws the same again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import vattn
from tests.campaign.contents import BRANCHES
from tests.campaign.lifetimes import CACHE_LOOKS, Child, Close, Drop, Forget, Keep, Look, Make
from tests.campaign.operations import (
    Admit,
    Alloc,
    Commit,
    Evict,
    Fork,
    Free,
    Lag,
    Operation,
    Retract,
    Step,
    Trim,
    Unshare,
)
from tests.campaign.world import CacheUnderTest, Config, World, make_config
from vattn.config import resolve
from vattn.layout import Layout

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "float8_e5m2")
WINDOWS: tuple[tuple[int | None, ...], ...] = (
    (None,),
    (None, None),
    (None, 4),
    (None, 4),
    (4,),
    (1,),
    (None, 1),
    (9, 20),
    (None, 12),
    (None, 50),
    (40,),
    (3, 3, None),
)


# Operations between two checks, where the worker is never waited for.
SELDOM = 1000
PAGE_SIZES = (4096, 8192, 65536, 2 << 20)
_MOST_BYTES = 192 << 20  # of a pool


def draw_config(rng: random.Random, *, table: bool = False) -> Config:
    """A configuration that a cache can have."""
    while True:
        (page_size,) = rng.choices(PAGE_SIZES, (88, 8, 3, 1))
        zeroes = rng.random() < 0.3
        guard = rng.choice(("zero", "zero", "zero", "strict"))
        try:
            caches = tuple(_draw_cache(rng, page_size, zeroes, guard) for _ in range(rng.choice((1, 1, 1, 1, 2, 3))))
            pages = [_most_pages(options) for options in caches]
            for options, most in zip(caches, pages, strict=True):
                options["memory_budget"] = page_size * max(1, int(most * rng.choice((0.3, 0.6, 1.0, 1.5))))
            total = max(1, int(sum(pages) * rng.choice((0.4, 0.8, 1.5))))
            blocks = [options["max_context_len"] // _block_tokens(options, total) for options in caches]
        except vattn.ConfigError:
            continue
        if total * page_size > _MOST_BYTES:
            continue
        # Mostly such that several blocks fit a request.
        if min(blocks) >= 3 or rng.random() < 0.05:
            return Config(
                total,
                caches,
                page_size=page_size,
                zero_on_free=zeroes,
                guard=guard,
                own=not table and rng.random() < 0.1,
                table=table,
                every=rng.choice((5, SELDOM) if is_large(caches) else (1, 2, 5, 10, SELDOM)),
                drop=rng.random() < 0.2,
                books=rng.random() < 0.05,
            )


def is_large(caches: Sequence[dict[str, Any]]) -> bool:
    """Whether a step may take thousands of pages: minutes, where every driver call takes longer."""
    return any(options["max_context_len"] > 400 for options in caches)


def repeats(config: Config, most: int) -> int:
    """How often a scenario may be played again: rarely where it has much memory to compare."""
    return max(2, min(most, (64 << 20) // (config.pool_pages * config.page_size)))


def crowded(config: Config) -> Config:
    """The same with one cache, which is full as long as all but one of its slots are, and backs ahead."""
    options = config.caches[0] | {
        "groups": [{k: v for k, v in group.items() if k != "sliding_window"} for group in config.caches[0]["groups"]],
        "max_batch_size": max(2, config.caches[0]["max_batch_size"]),
        "overlap": True,
        "eager_pages": 0,
        "zero_on_free": config.zero_on_free,
    }
    pages = _full(options) * (options["max_batch_size"] - 1)
    options["memory_budget"] = pages * config.page_size
    return replace(config, pool_pages=pages, caches=(options,))


def _full(options: dict[str, Any]) -> int:
    """Pages of a slot at its longest."""
    return _layout(options, 1 << 20).pages(options["max_context_len"] + options["guard_rows"])


def _block_tokens(options: dict[str, Any], pages: int) -> int:
    """Tokens of a block; a ConfigError where a pool of so many pages cannot have the cache."""
    return _layout(options, pages).bands[0].block_tokens


def _layout(options: dict[str, Any], pages: int) -> Layout:
    size = options["page_size"]
    return resolve(make_config(options), pool_page_size=size, pool_budget=pages * size)[0]


def _draw_cache(rng: random.Random, page_size: int, zeroes: bool, guard: str) -> dict[str, Any]:
    windows = rng.choice(WINDOWS)
    large = page_size > 8192  # wide rows, so that it takes no more than some hundred tokens to fill a page
    heads = 2 if large else rng.choice((1, 1, 2))
    head_dim = 128 if large else rng.choice((16, 32, 64, 128, 128))
    groups = []
    layer = 0
    for window in windows:
        count = 2 if large else rng.choice((1, 1, 2))
        group: dict[str, Any] = {
            "layers": list(range(layer, layer + count)),
            "num_kv_heads": heads if large or rng.random() < 0.8 else 3 - heads,
            "head_dim": head_dim,
        }
        if window is not None:
            group["sliding_window"] = window
        if not large and rng.random() < 0.2:
            group["v_head_dim"] = rng.choice((0, head_dim // 2, head_dim * 3 // 2))
        if not large and rng.random() < 0.15:
            group["dtype"] = rng.choice(DTYPES)
        layer += count
        groups.append(group)
    options = {
        "groups": groups,
        "dtype": rng.choice(("float32", "float64") if large else (*DTYPES, "float32", "float32", "float64")),
        "max_batch_size": rng.choice((1, 2, 3, 3, 4, 4, 5)),
        "max_context_len": rng.choice((40, 64, 90, 128, 200)),
        "page_size": page_size,
        "layout": rng.choice(("sliced", "fused") if large else ("layer", "sliced", "fused")),
        "kv_order": rng.choice(("NHD", "HND")),
        "overlap": rng.random() < 0.5,
        "deferred_reclamation": rng.random() < 0.7,
        "eager_pages": rng.choice((0, 0, 1, 2)),
        "watermark": rng.choice((0.0, 0.1, 0.5, 0.9)),
        "guard_rows": rng.choice((0, 0, 0, 1, 5)),
        "guard": rng.choice(("zero", guard)),
        "zero_on_free": zeroes and rng.random() < 0.8,
    }
    if page_size > 4096:
        block = _block_tokens(options, 1 << 16)
        options["max_context_len"] = block * rng.randint(3, 5) + rng.randrange(block)
    elif rng.random() < 0.04:
        options["max_context_len"] = rng.choice((700, 1500, 4000))
        options["max_batch_size"] = min(3, options["max_batch_size"])
    return options


def _most_pages(options: dict[str, Any]) -> int:
    """Pages of all slots at their longest, about."""
    sizes = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
    total = 0
    for group in options["groups"]:
        size = sizes.get(group.get("dtype", options["dtype"]), 1)
        dims = group["head_dim"] + group.get("v_head_dim", group["head_dim"])
        total += len(group["layers"]) * group["num_kv_heads"] * dims * size
    return max(4, -(-total * options["max_context_len"] * options["max_batch_size"] // options["page_size"]))


class Source(Protocol):
    """What draws operations."""

    def operations(self, world: World, count: int) -> Iterator[Operation]: ...

    def target(self, world: World) -> tuple[list[Operation], Operation]:
        """An operation that is a call, to be interrupted, and those that it needs before it."""

    def leaving(self, world: World) -> Iterator[Operation]:
        """Every cache, or all block windows, closed or dropped."""


class Drawer:
    """Draws operations, one after another, for the model as it is then.

    Args:
        full: begin with a cache that `crowded` made for it being full.
    """

    def __init__(self, rng: random.Random, *, full: bool = False) -> None:
        self.rng = rng
        self._full = full
        self._label = 0
        self._next: tuple[int, int, type[Operation]] | None = None  # what usually follows: cache, request, which

    def operations(self, world: World, count: int) -> Iterator[Operation]:
        """So many, each drawn when the one before it has been made; sometimes with an opening before them."""
        if self._full:
            yield from self._taken(world)
        elif self.rng.random() < 0.4:
            openings = (self._opening, self._copied, self._turns, self._left)
            zeroing = any(each.zeroes for each in world.caches)
            (opening,) = self.rng.choices(openings, (0.4, 0.2, 0.2, 1.0 if zeroing else 0.2))
            yield from opening(world)
        for _ in range(count):
            yield self.draw(world)

    def draw(self, world: World) -> Operation:
        rng = self.rng
        if self._next is not None and rng.random() < 0.7:
            (number, label, kind), self._next = self._next, None
            if (request := world.caches[number].model.requests.get(label)) is not None:
                if kind is Commit:
                    return Commit(number, label)
                self._next = number, label, Commit
                return Step(number, {label: (max(request.total, request.restored_from or 0), self._stream())})
        number = rng.randrange(len(world.caches))
        each = world.caches[number]
        if not each.open and rng.random() < 0.6:
            return Make(number)
        running = list(each.model.requests)
        room = len(running) < each.slots or rng.random() < 0.02
        choices: list[tuple[int, Callable[[int, CacheUnderTest, list[int]], Operation]]] = [
            (1, lambda n, e, r: Evict(n)),
            (1, lambda n, e, r: Trim(n)),
            (1, self._life),
        ]
        if room:
            choices += [(8, self._admit), (3, self._alloc)]
        if running:
            choices += [(20, self._step), (2, self._commit), (5, self._free), (1, self._retract)]
            choices += [(1, lambda n, e, r: Unshare(n, rng.choice(r)))]
            choices += [(8, self._fork)] if room else [(5, self._free)]
        weights = [weight for weight, _ in choices]
        ((_, drawn),) = rng.choices(choices, weights)
        return drawn(number, each, running)

    def _opening(self, world: World) -> Iterator[Operation]:
        """A few operations that lead to where requests touch each other: behind a window, in what they share, and next
        to what is parked.
        """
        rng = self.rng
        number = rng.randrange(len(world.caches))
        each = world.caches[number]
        windows = [window for window in each.model.windows.values() if window is not None]
        # So long that a block or two have left a window.
        length = each.block * rng.randint(1, 2) + rng.randint(0, each.block) + (rng.choice(windows) if windows else 0)
        if each.slots < 2 or length + 1 > each.context:
            return
        earlier, first, second, third = (self.next_label() for _ in range(4))
        if rng.random() < 0.7:  # pages of another request, which will be parked
            yield Alloc(number, earlier)
            yield Step(number, {earlier: (rng.randint(1, length), 1)})
        # Of tokens that are copied in, windows lack those before the end of a block.
        near = each.block * rng.randint(1, length // each.block) + rng.randint(1, 3)
        start = rng.choice((0, 0, 0, rng.randint(1, length), min(length, near)))
        yield Alloc(number, first, start=start) if start else Admit(number, first, length, 0)
        yield Step(number, {first: (length, 0)})
        if rng.random() < 0.7:
            yield Step(number, {first: (length + 1, 0)})
        if rng.random() < 0.5:
            yield Commit(number, first)
        yield Free(number, earlier, told=rng.random() < 0.5)
        yield rng.choice((Fork(number, first, second), Admit(number, second, length, 0)))
        yield Step(number, {second: (rng.choice((length, length + 1, max(1, length - each.block))), 0)})
        yield Commit(number, rng.choice((first, second)))
        yield rng.choice((Free(number, first), Free(number, second), Step(number, {first: (length // 2, 0)})))
        yield Admit(number, third, length, 0)

    def _copied(self, world: World) -> Iterator[Operation]:
        """Tokens that are copied in, of which windows lack the first; they are published, and another request comes
        whose prefix ends before the first that was computed, where windows would have to show what they lack.
        """
        rng = self.rng
        windowed = [
            (number, window)
            for number, each in enumerate(world.caches)
            for window in each.model.windows.values()
            if window is not None and window > 1 and each.slots > 1 and each.context > each.block + 1
        ]
        if not windowed:
            return
        number, window = rng.choice(windowed)
        each = world.caches[number]
        first, second, third = (self.next_label() for _ in range(3))
        prefix = each.block * rng.randint(1, (each.context - 2) // each.block)
        start = min(each.context - 1, prefix + rng.randint(1, min(window, each.block)))
        yield Alloc(number, first, start=start)
        yield Step(number, {first: (rng.randint(start, each.context), 0)})
        if rng.random() < 0.5:
            yield Fork(number, first, second)
            yield Free(number, first, told=rng.random() < 0.5)
        yield Commit(number, first)
        yield Commit(number, second)
        if rng.random() < 0.5:
            yield rng.choice((Free(number, first), Free(number, second)))
        yield Admit(number, third, min(each.context, prefix + rng.randint(1, each.block)), 0)
        yield Step(number, {third: (prefix + 1, 0)})

    def _turns(self, world: World) -> Iterator[Operation]:
        """A conversation: requests that end and say what they held, and others that go on with it, when something else
        has had the time to take its pages.
        """
        rng = self.rng
        number = rng.randrange(len(world.caches))
        each = world.caches[number]
        length = rng.randint(1, 2 * each.block)
        while length + 2 < each.context:
            label = self.next_label()
            yield Admit(number, label, length, 0)
            yield Step(number, {label: (length, 0)})
            if rng.random() < 0.1:
                yield Retract(number, label)
            yield Free(number, label, told=rng.random() < 0.9)
            if rng.random() < 0.3:
                yield self.draw(world)
            length += rng.randint(1, each.block)
            if rng.random() < 0.2:
                return

    def _left(self, world: World) -> Iterator[Operation]:
        """Published blocks that stay in an idle slot, and are withdrawn by who published them, or found in part or not
        at all by a request whose first step adds nothing: what it does not use must not be seen.
        """
        rng = self.rng
        fit = [
            (number, each)
            for number, each in enumerate(world.caches)
            if each.context > 2 * each.block and (each.zeroes or rng.random() < 0.3)
        ]
        if not fit:
            return
        number, each = rng.choice(fit)
        first, second, third = (self.next_label() for _ in range(3))
        blocks = rng.randint(2, (each.context - 1) // each.block)
        length = min(each.context, blocks * each.block + rng.randint(1, each.block))
        yield Admit(number, first, length, 0)
        yield Step(number, {first: (length, 0)})
        yield Commit(number, first)
        if each.slots == 1 or rng.random() < 0.3:
            for _ in range(each.slots - 1):  # so that the next request gets this slot, at once
                yield Alloc(number, self.next_label())
            lags = rng.random() < 0.5
            if lags:
                yield Lag(number, _lag(each))
            yield Free(number, first)
            yield rng.choice((Alloc(number, third), Admit(number, third, length, 0, 1)))
            yield Step(number, {third: (0, 0)})
            if lags:
                yield Lag(number)
            return
        yield Admit(number, second, length, 0)
        yield Step(number, {second: (length, 0)})
        if rng.random() < 0.5:
            yield Free(number, second)
            yield Step(number, {first: (min(length + 1, each.context), 0)})
            yield Retract(number, first)
        else:
            yield Free(number, first)
            yield Step(number, {second: (min(length + 1, each.context), 0)})
            found = rng.randint(1, blocks - 1) * each.block
            yield Admit(number, third, found + rng.randint(1, each.block), 0)
            yield Step(number, {third: (found, 0)})

    def _taken(self, world: World) -> Iterator[Operation]:
        """A full cache, a request that ends there, and a step that takes the last of its pages ahead of need; sometimes
        another request has its slot before that is done.
        """
        number = self.rng.randrange(len(world.caches))
        each = world.caches[number]
        waiting, *others = (self.next_label() for _ in range(each.slots))
        yield Alloc(number, waiting)
        for label in others:
            yield Alloc(number, label)
            yield Step(number, {label: (each.context, 0)})
        ended = self.rng.choice(others or [waiting])
        if self.rng.random() < 0.5:
            yield Commit(number, ended)
        yield Free(number, ended)
        if self.rng.random() < 0.5:
            begin = self.rng.choice((0, 1, min(each.block, each.context)))
            yield Step(number, {waiting: (begin, 0)}, {waiting: each.context})
            return
        after = self.next_label()
        yield Lag(number, _lag(each))
        yield Step(number, {waiting: (0, 0)}, {waiting: each.context})
        yield Alloc(number, after)
        yield Step(number, {after: (self.rng.choice((0, min(each.block, each.context))), 0)})
        yield Lag(number)

    def behind(self, world: World) -> Iterator[Operation]:
        """A request that ends while the worker still backs what was to come of it, and a fork that gets its slot."""
        rng = self.rng
        number = rng.randrange(len(world.caches))
        each = world.caches[number]
        if not each.open or each.slots < 2:
            return
        running = list(each.model.requests)
        for label in running[: max(0, len(running) + 2 - each.slots)]:
            yield Free(number, label)
        first, second, third = (self.next_label() for _ in range(3))
        length = rng.randint(1, each.context)
        yield Alloc(number, first)
        yield Step(number, {first: (length, 0)})
        yield Alloc(number, second)
        yield Step(number, {second: (rng.randint(1, length), 0)}, {second: each.context})
        yield Free(number, second)
        yield Fork(number, first, third)

    def target(self, world: World) -> tuple[list[Operation], Operation]:
        """An operation that is a call, to be interrupted, and those that it needs before it."""
        rng = self.rng
        if rng.random() < 0.3:
            number = rng.randrange(len(world.caches))
            if world.caches[number].open:
                if rng.random() < 0.3:
                    return [Close(number)], Make(number)
                return [], rng.choice((Close(number), Look(number, what="check()"), Look(number, what=_look(rng))))
            return [], Make(number)
        drawn = (self.draw(world) for _ in itertools.count())
        calls = (each for each in drawn if type(each).perform is Operation.perform and each.call(world) is not None)
        if rng.random() < 0.4:  # one that gives a slot, which is lost where nobody gets its number
            few = list(itertools.islice(calls, 10))
            return [], next((each for each in few if isinstance(each, (Admit, Alloc, Fork))), few[-1])
        return [], next(calls)

    def leaving(self, world: World) -> Iterator[Operation]:
        """Every cache, closed or dropped, often while its last pages are being unmapped."""
        for number, each in enumerate(world.caches):
            for label in list(each.model.requests) if self.rng.random() < 0.7 else ():
                yield Free(number, label)
            yield self.rng.choice((Close, Drop))(number)

    def next_label(self) -> int:
        self._label += 1
        return self._label

    def _life(self, number: int, each: CacheUnderTest, running: list[int]) -> Operation:
        rng = self.rng
        kinds: list[Operation] = [
            Close(number),
            Drop(number),
            Keep(number, how=rng.choice(("layer", "lend", "dlpack"))),
            Keep(number, how="lend"),
            Forget(number, which=rng.randrange(4)),
            Look(number, what=_look(rng)),
        ]
        return Child(number) if rng.random() < 0.05 else rng.choice(kinds)

    def _alloc(self, number: int, each: CacheUnderTest, running: list[int]) -> Operation:
        rng = self.rng
        hint = rng.randrange(each.context + 1) if rng.random() < 0.5 else None
        start = rng.randrange(1, each.context) if rng.random() < 0.4 else 0
        label = self.next_label()
        self._next = (number, label, Step) if start else None
        return Alloc(number, label, hint, start)

    def _admit(self, number: int, each: CacheUnderTest, running: list[int]) -> Operation:
        rng = self.rng
        length = self._near_block(each, 1)
        self._next = number, self.next_label(), Step
        return Admit(number, self._label, length, self._stream(), int(rng.random() < 0.1))

    def _step(self, number: int, each: CacheUnderTest, running: list[int]) -> Operation:
        rng = self.rng
        labels = rng.sample(running, rng.choice((1, 1, len(running), rng.randint(1, len(running)))))
        lengths, ahead = {}, {}
        for label in labels:
            lengths[label] = (self._length(each, label), self._stream())
            if rng.random() < 0.1:
                ahead[label] = rng.randint(lengths[label][0], each.context)
        self._next = number, rng.choice(labels), Commit
        return Step(number, lengths, ahead, rng.random() < 0.1)

    def _length(self, each: CacheUnderTest, label: int) -> int:
        rng = self.rng
        request = each.model.requests[label]
        drawn = rng.random()
        if drawn < 0.2 and request.length:
            back = rng.randint(0, request.length)
            return rng.choice((0, request.back, back, back, max(0, request.length - 1)))
        if drawn < 0.45 and request.total > request.length:
            return request.total
        if drawn < 0.75:
            return min(each.context, request.length + rng.choice((1, 1, 2, 5)))
        if request.restored_from is not None and drawn < 0.95:
            return rng.randint(request.restored_from, each.context)
        return self._near_block(each, request.length)

    def _near_block(self, each: CacheUnderTest, low: int) -> int:
        """A length from `low` on; often at the end of a block, or next to it."""
        rng = self.rng
        low = min(low, each.context)
        if rng.random() < 0.6:
            blocks = each.context // each.block
            # Where a block begins, and where one has just left a window.
            window = rng.choice([window or 1 for window in each.model.windows.values()])
            near = rng.randint(0, blocks) * each.block + rng.choice((-1, 0, 1, window, window + 1))
            if low <= near <= each.context:
                return near
        return rng.randint(low, each.context)

    def _commit(self, number: int, each: CacheUnderTest, running: list[int]) -> Operation:
        length = self.rng.randrange(each.context) if self.rng.random() < 0.2 else None
        return Commit(number, self.rng.choice(running), length)

    def _fork(self, number: int, each: CacheUnderTest, running: list[int]) -> Operation:
        self._next = number, self.next_label(), Commit
        return Fork(number, self.rng.choice(running), self._label)

    def _retract(self, number: int, each: CacheUnderTest, running: list[int]) -> Operation:
        return Retract(number, self.rng.choice(running))

    def _free(self, number: int, each: CacheUnderTest, running: list[int]) -> Operation:
        return Free(number, self.rng.choice(running), told=self.rng.random() < 0.5)

    def _stream(self) -> int:
        return self.rng.choice((0,) * 12 + tuple(range(len(BRANCHES))))


def _lag(each: CacheUnderTest) -> float:
    """How much longer driver calls have to take, for a slot to be emptied later than an opening's calls are made."""
    return 0.05 / _full(each.options)


def _look(rng: random.Random) -> str:
    return rng.choice(CACHE_LOOKS)
