"""Operations: what a scenario is a list of. Plain data, so that any of them can be left out or made simpler.

Requests have labels that the scenario gives them. An operation on a request that does not run does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import vattn
from tests.campaign import contents
from tests.campaign.model import Request
from tests.campaign.world import CacheUnderTest, Call, Found, Refused, World, tokens_code

SALTS = (b"", b"other")


@dataclass(frozen=True)
class Operation:
    """An operation on one cache, by its number."""

    cache: int

    def call(self, world: World) -> Call | None:
        """What is called; None where it makes no sense here."""
        raise NotImplementedError

    def accept(self, world: World, value: Any) -> None:
        """The call returned that value: what it promised is looked at, and the model follows."""

    def moved(self, by: int) -> Operation:
        """The same on a cache with another number."""
        return replace(self, cache=self.cache + by)

    def settle(self, world: World) -> bool:
        """The call was interrupted: the model follows what became of it; False if lengths say all of that."""
        return False

    def perform(self, world: World) -> None:
        """Makes it."""
        if (call := self.call(world)) is not None:
            with contextlib.suppress(Refused):
                self.accept(world, world.call(call))

    def simpler(self) -> Iterator[Operation]:
        """Forms that might show the same."""
        return iter(())


@dataclass(frozen=True)
class Alloc(Operation):
    """`alloc_reqid`; with `start`, for a request whose first tokens are going to be copied in."""

    label: int
    num_tokens: int | None = None
    start: int = 0

    def call(self, world: World) -> Call | None:
        each = world.caches[self.cache]
        hint = "" if self.num_tokens is None else str(self.num_tokens)
        start = f"start={self.start}" if self.start else ""
        return _of(each, f"alloc_reqid({', '.join(filter(None, (hint, start)))})", f"r{self.label}", _no_slot(each))

    def accept(self, world: World, value: Any) -> None:
        _begin(world, self.cache, self.label, value, Request(b"", [], 0, 0, self.start or None))

    def simpler(self) -> Iterator[Operation]:
        if self.start:
            yield replace(self, start=0)
        if self.num_tokens is not None:
            yield replace(self, num_tokens=None)


@dataclass(frozen=True)
class Admit(Operation):
    """`admit` of the first `length` tokens of a text."""

    label: int
    length: int
    stream: int
    salt: int = 0

    def call(self, world: World) -> Call | None:
        each = world.caches[self.cache]
        code = f"admit({tokens_code([(self.stream, 0, self.length)])}, {SALTS[self.salt]!r})"
        return _of(each, code, f"r{self.label}, cached", _no_slot(each))

    def accept(self, world: World, value: Any) -> None:
        each = world.caches[self.cache]
        cached = value.cached_tokens
        if not 0 <= cached < self.length:
            raise Found("admit returned a prefix that cannot be", f"{value} of {self.length} tokens")
        request = Request(SALTS[self.salt], [(self.stream, 0, self.length)], cached, cached)
        each.model.query_tokens += self.length
        each.model.hit_tokens += cached
        world.counts["hits"] += cached > 0
        if cached and request.chain()[cached - 1] not in each.model.committed:
            raise Found("a prefix was hit that nobody committed", f"{value}")
        _begin(world, self.cache, self.label, value.reqid, request)

    def simpler(self) -> Iterator[Operation]:
        if self.salt:
            yield replace(self, salt=0)
        if self.stream:
            yield replace(self, stream=0)


@dataclass(frozen=True)
class Step(Operation):
    """`step` to a length per label, with the text that goes on where tokens are new."""

    lengths: dict[int, tuple[int, int]]
    ahead: dict[int, int] = field(default_factory=dict)
    sequence: bool = False

    def call(self, world: World) -> Call | None:
        each = world.caches[self.cache]
        if not each.open:
            return _of(each, "step({})")
        requests = each.model.requests
        named = {label: length for label, (length, _) in self._lengths(world).items()}
        if self.lengths and not named:
            return None
        slots = each.model.slots
        promised = world.look(lambda: sum(each.it.pages_needed(n, slots[label]) for label, n in named.items()))
        available = world.look(each.it.available_pages)
        expected: list[type[BaseException]] = []
        if each.model.windowed and any(0 < n < requests[label].back for label, n in named.items()):
            expected.append(vattn.InvalidLength)
        if promised > available:
            expected.append(vattn.OutOfPages)
        if self.sequence and all(named.values()):
            by_slot = {each.model.slots[label]: n for label, n in named.items()}
            lengths = str([by_slot.get(slot, 0) for slot in range(each.slots)])
        else:
            lengths = _mapping(named)
        ahead = _mapping({label: n for label, n in self.ahead.items() if label in requests})
        code = f"{each.name}.step({lengths}, {ahead})" if len(ahead) > 2 else f"{each.name}.step({lengths})"
        return Call(code, expected=tuple(expected))

    def accept(self, world: World, value: Any) -> None:
        each = world.caches[self.cache]
        lengths = self._lengths(world)
        before = {label: each.model.requests[label].length for label in lengths}
        written = each.model.step(lengths)
        mapped = {pages.reqid: pages.mapped for pages in world.look(each.it.page_map)}
        for label, (length, _) in lengths.items():
            backed = mapped[each.model.slots[label]]
            if length > before[label] and backed < length + each.guard_rows:
                raise Found(
                    "a step did not back its tokens",
                    f"{backed} of {length} tokens, and {each.guard_rows} guard rows",
                    f"print({each.name}.page_map())",
                )
        for label in written:
            request = each.model.requests[label]
            world.see(each, label, upto=before[label])
            # Rows that are not backed can be read; what is mapped ahead meanwhile may be zeroed a moment later.
            if world.config.guard == "zero" and not each.options["overlap"]:
                world.see_zeros(each, label, each.context)
            else:
                world.see_zeros(each, label, request.length, written[label])
            world.put(each, label, written[label])
            request.reached = max(request.reached, request.length)

    def keeps_lengths(self, world: World) -> bool:
        """Whether no length changes."""
        requests = world.caches[self.cache].model.requests
        return all(requests[label].length == length for label, (length, _) in self._lengths(world).items())

    def _lengths(self, world: World) -> dict[int, tuple[int, int]]:
        """Those that name a request, and not one to be copied in with no token."""
        requests = world.caches[self.cache].model.requests
        return {
            label: (length, stream)
            for label, (length, stream) in self.lengths.items()
            if label in requests and (length or requests[label].restored_from is None)
        }

    def simpler(self) -> Iterator[Operation]:
        if self.ahead:
            yield replace(self, ahead={})
        if self.sequence:
            yield replace(self, sequence=False)
        for label, (length, stream) in self.lengths.items():
            yield replace(self, lengths={other: n for other, n in self.lengths.items() if other != label})
            if stream:
                yield replace(self, lengths=self.lengths | {label: (length, 0)})


@dataclass(frozen=True)
class Commit(Operation):
    """`commit` of the first `length` tokens, or of all that are computed."""

    label: int
    length: int | None = None

    def call(self, world: World) -> Call | None:
        each = world.caches[self.cache]
        request = each.model.requests.get(self.label)
        if request is None:
            return None
        tokens = tokens_code(request.upto(self._length(request)))
        # It may refuse fewer tokens than are known, and rows before a window that were never there.
        expected = vattn.VattnError if request.written else vattn.TokenMismatch
        return Call(f"{each.name}.commit(r{self.label}, {tokens})", expected=(expected,))

    def accept(self, world: World, value: Any) -> None:
        model = world.caches[self.cache].model
        request = model.requests[self.label]
        model.committed.update(request.chain()[: self._length(request)])

    def _length(self, request: Request) -> int:
        return request.length if self.length is None else min(self.length, request.length)

    def simpler(self) -> Iterator[Operation]:
        if self.length is not None:
            yield replace(self, length=None)


@dataclass(frozen=True)
class Retract(Operation):
    """`retract`: fewer prefixes are found afterwards, which the model does not count."""

    label: int

    def call(self, world: World) -> Call | None:
        each = world.caches[self.cache]
        return Call(f"{each.name}.retract(r{self.label})") if self.label in each.model.requests else None


@dataclass(frozen=True)
class Unshare(Operation):
    """`unshare`, after which all rows can be written."""

    label: int

    def call(self, world: World) -> Call | None:
        each = world.caches[self.cache]
        if self.label not in each.model.requests:
            return None
        return Call(f"{each.name}.unshare(r{self.label})", expected=(vattn.OutOfPages,))

    def accept(self, world: World, value: Any) -> None:
        each = world.caches[self.cache]
        request, slot = each.model.requests[self.label], each.model.slots[self.label]
        world.see(each, self.label)
        firsts = each.model.firsts(request)
        for (layer, side), array in each.arrays.items():
            first, end = firsts[layer], request.length
            if first < end:
                if not contents.writable(array, slot, first, end):
                    raise Found("rows cannot be written after unshare", f"{each.name} slot {slot}, from row {first} on")
                array[slot, first:end] = request.rows((layer, side), first, end, array.shape[2:])


@dataclass(frozen=True)
class Fork(Operation):
    """`fork`."""

    label: int
    child: int

    def call(self, world: World) -> Call | None:
        each = world.caches[self.cache]
        if self.label not in each.model.requests:
            return None
        return Call(f"{each.name}.fork(r{self.label})", f"r{self.child}", (*_no_slot(each), vattn.OutOfPages))

    def accept(self, world: World, value: Any) -> None:
        _begin(world, self.cache, self.child, value, world.caches[self.cache].model.requests[self.label].copy())


@dataclass(frozen=True)
class Free(Operation):
    """`free_reqid`, with the request's tokens or without them."""

    label: int
    told: bool = False

    def call(self, world: World) -> Call | None:
        each = world.caches[self.cache]
        request = each.model.requests.get(self.label)
        if request is None:
            return None
        if not self.told:
            return Call(f"{each.name}.free_reqid(r{self.label})")
        code = f"{each.name}.free_reqid(r{self.label}, token_ids={tokens_code(request.upto(request.length))})"
        return Call(code, expected=(vattn.VattnError if request.written else vattn.TokenMismatch,))

    def accept(self, world: World, value: Any) -> None:
        model = world.caches[self.cache].model
        request = model.requests[self.label]
        if self.told:
            model.committed.update(request.chain()[: request.length])
        del model.requests[self.label], model.slots[self.label]

    def simpler(self) -> Iterator[Operation]:
        if self.told:
            yield replace(self, told=False)


@dataclass(frozen=True)
class Evict(Operation):
    """`evict_prefixes`."""

    def call(self, world: World) -> Call | None:
        return _of(world.caches[self.cache], "evict_prefixes()")

    def accept(self, world: World, value: Any) -> None:
        if left := world.look(world.caches[self.cache].it.stats).cached_pages:
            raise Found("evict_prefixes left cached pages", str(left))


@dataclass(frozen=True)
class Trim(Operation):
    """`trim`."""

    def call(self, world: World) -> Call | None:
        return _of(world.caches[self.cache], "trim()")


@dataclass(frozen=True)
class Lag(Operation):
    """From now on every driver call takes so many seconds longer, where the world's table allows it, and nothing is
    checked: what is planned in the background has not happened when the next calls are made. With 0 that ends.
    """

    seconds: float = 0.0

    def perform(self, world: World) -> None:
        if world.table is not None:
            world.run(f"table.delay = {self.seconds or world.config.delay}")
            world.lags = self.seconds > 0
            if not world.lags:
                world.check()


def _mapping(lengths: dict[int, int]) -> str:
    return "{" + ", ".join(f"r{label}: {length}" for label, length in lengths.items()) + "}"


def _no_slot(each: CacheUnderTest) -> tuple[type[BaseException], ...]:
    return (vattn.NoFreeSlot,) if len(each.model.requests) == each.slots else ()


def _of(each: CacheUnderTest, code: str, into: str = "", expected: tuple[type[BaseException], ...] = ()) -> Call | None:
    """A call on a cache; None if the cache was dropped. One that was closed says so."""
    if each.cache is None:
        return None
    made = Call(f"{each.name}.{code}", into, expected)
    return made if each.open else replace(made, expected=(vattn.CacheClosed,), refused=True)


def _begin(world: World, cache: int, label: int, slot: int, request: Request) -> None:
    each = world.caches[cache]
    if slot in each.model.slots.values() or not 0 <= slot < each.slots:
        raise Found("a slot was given out twice", str(slot))
    world.names[f"r{label}"] = slot
    each.model.requests[label], each.model.slots[label] = request, slot
