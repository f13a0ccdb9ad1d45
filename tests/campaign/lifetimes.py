"""Caches and block windows that are closed, dropped and made again in the midst of a scenario; memory that outlives
them; and children that have none of it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import vattn
from tests.campaign import contents
from tests.campaign.operations import Operation
from tests.campaign.world import (
    CacheUnderTest,
    Call,
    Found,
    Kept,
    WindowsUnderTest,
    World,
    cache_code,
    windows_code,
)

Under = CacheUnderTest | WindowsUnderTest


@dataclass(frozen=True)
class Life(Operation):
    """An operation on a cache, or on block windows, as such.

    Attributes:
        blocks: the number is that of block windows.
    """

    blocks: bool = False

    def under(self, world: World) -> Under:
        return world.windows[self.cache] if self.blocks else world.caches[self.cache]

    def moved(self, by: int) -> Operation:
        return self if self.blocks else replace(self, cache=self.cache + by)


@dataclass(frozen=True)
class Close(Life):
    """`close`, which may be called again."""

    def call(self, world: World) -> Call | None:
        each = self.under(world)
        return None if self._exists(each) is None else Call(f"{each.name}.close()")

    @staticmethod
    def _exists(each: Under) -> Any:
        return each.cache if isinstance(each, CacheUnderTest) else each.windows

    def accept(self, world: World, value: Any) -> None:
        each = self.under(world)
        if each.open:
            world.ended(each, dropped=False)

    def settle(self, world: World) -> bool:
        each = self.under(world)
        if each.open:
            with contextlib.suppress(vattn.CacheClosed), world.quiet():
                each.it.stats()
                return True
            world.call(Call(f"{each.name}.close()"))  # goes on where it was interrupted
            world.ended(each, dropped=False)
        return True


@dataclass(frozen=True)
class Drop(Life):
    """The last reference goes, but for those of kept tensors."""

    def perform(self, world: World) -> None:
        each = self.under(world)
        if not each.open:
            return
        owners = [kept for kept in world.kept if kept.source is each and kept.owner is not None and not kept.over]
        ref = weakref.ref(each.it)
        world.lines.append(f"import gc; del {each.name}; gc.collect()")
        world.ended(each, dropped=True)
        if ref() is not None:
            gc.collect()
        if (ref() is None) == bool(owners):
            raise Found(
                "a cache whose tensors own it is collected" if owners else "a dropped cache is not collected",
                each.name,
            )


@dataclass(frozen=True)
class Make(Life):
    """The cache, or the block windows, anew, where they were closed or dropped."""

    def call(self, world: World) -> Call | None:
        each = self.under(world)
        if each.open:
            return None
        make = cache_code if isinstance(each, CacheUnderTest) else windows_code
        code = make(each.options, world.config)
        return Call(code, each.name)

    def accept(self, world: World, value: Any) -> None:
        each = self.under(world)
        world.names[each.name] = value
        if isinstance(each, CacheUnderTest):
            world.caches[self.cache] = world.known_cache(each.name, each.options)
        else:
            world.windows[self.cache] = world.known_windows(each.name, each.options)

    def settle(self, world: World) -> bool:
        return True  # nobody got it, so the books have to be as they were


@dataclass(frozen=True)
class Keep(Life):
    """Somebody keeps tensors: those of a layer, ones that own their cache, or the same memory by DLPack."""

    how: str = "layer"

    def perform(self, world: World) -> None:
        each = self.under(world)
        if not each.open or len(world.kept) > 5:
            return
        owner = None
        if isinstance(each, CacheUnderTest):
            arrays: dict[Any, Any] = {}
            if self.how == "lend":
                owner = weakref.ref(each.it)
                world.lines.append(
                    f"kept{len(world.kept)} = [{each.name}.lend(i, {each.name}) for i in {each.name}.layers]"
                )
            for layer in each.it.layers:
                lent = each.it.lend(layer, each.it) if self.how == "lend" else each.it.layer(layer)
                for side, tensor in enumerate(lent):
                    if tensor.numel():
                        arrays[layer, side] = self._held(tensor)
        else:
            of = each.it.window if self.how == "lend" else each.it.home
            arrays = {layer: contents.flat(of(layer)) for layer in range(each.model.layers)}
        world.calls += len(arrays)
        world.kept.append(Kept(each, arrays, owner))

    def _held(self, tensor: torch.Tensor) -> Any:
        seen = tensor.view(torch.uint8)
        return torch.from_dlpack(seen).numpy() if self.how == "dlpack" else seen.numpy()


@dataclass(frozen=True)
class Forget(Life):
    """Kept tensors go, and with them what they owned."""

    which: int = 0

    def perform(self, world: World) -> None:
        if not world.kept:
            return
        gone = world.kept[self.which % len(world.kept)]
        owner, dropped = gone.owner, gone.requests is not None
        world.forget(lambda kept, gone=gone: kept is gone)  # type: ignore[misc]
        del gone
        if (
            owner is None
            or not dropped
            or any(kept.owner is not None and kept.owner() is owner() for kept in world.kept)
        ):
            return
        gc.collect()
        if owner() is not None:
            raise Found("a cache outlives the last tensor that owned it", repr(owner()))


@dataclass(frozen=True)
class Look(Life):
    """A call that only looks."""

    what: str = "stats()"

    def call(self, world: World) -> Call | None:
        each = self.under(world)
        if not each.open:
            return None
        return Call(f"{each.name}.{self.what}")


CACHE_LOOKS = ("check()", "stats()", "page_map()", "available_pages()", "capacity()", "pages_needed(3)", "layer(0)")
WINDOWS_LOOKS = ("check()", "stats()", "backed()", "shown(0)", "home(0)", "window(0)")


@dataclass(frozen=True)
class Child(Life):
    """A forked child, in which every call says that it is one."""

    def perform(self, world: World) -> None:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            for name, call in _public(world):
                try:
                    call()
                    wrong = "is accepted"
                except vattn.ForkedProcess:
                    world.calls += 1
                    continue
                except BaseException as error:
                    wrong = f"raises {type(error).__name__}"
                os.write(write, f"{name()} {wrong} in a forked child".encode())
                os._exit(1)
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(pid, 0)
        said = os.read(read, 1000).decode()
        os.close(read)
        world.counts["forks"] += 1
        world.calls += sum(1 for _ in _public(world))
        if os.WIFSIGNALED(status):
            raise Found(f"a forked child ends by {signal.Signals(os.WTERMSIG(status)).name}", "in a call")
        if status:
            raise Found(said, said)


def _public(world: World) -> Iterator[tuple[Callable[[], str], Callable[[], object]]]:
    """Calls on everything that is open, with their names."""
    for each in world.caches:
        if each.open:
            for call in _of_cache(each.it, next(iter(each.model.slots.values()), 0), world.pool):
                yield partial(_source, call), call
    for under in world.windows:
        if under.open:
            for call in _of_windows(under.it):
                yield partial(_source, call), call
    yield (lambda: "pool.close()"), world.pool.close


def _source(call: Callable[[], object]) -> str:
    return inspect.getsource(call).strip().removeprefix("lambda: ").rstrip(",")


def _of_cache(cache: vattn.KVCache, slot: int, pool: vattn.PagePool) -> list[Callable[[], object]]:
    return [
        lambda: cache.alloc_reqid(),
        lambda: cache.admit([1]),
        lambda: cache.commit(slot, []),
        lambda: cache.retract(slot),
        lambda: cache.fork(slot),
        lambda: cache.unshare(slot),
        lambda: cache.step({slot: 1}),
        lambda: cache.free_reqid(slot),
        lambda: cache.layer(0),
        lambda: cache.lend(0, None),
        lambda: cache.stats(),
        lambda: cache.page_map(),
        lambda: cache.available_pages(),
        lambda: cache.pages_needed(2, slot),
        lambda: cache.evict_prefixes(),
        lambda: cache.trim(),
        lambda: cache.check(),
        lambda: cache.close(),
        lambda: vattn.KVCache(cache.config, pool=pool),
    ]


def _of_windows(windows: vattn.BlockWindows) -> list[Callable[[], object]]:
    return [
        lambda: windows.back([0]),
        lambda: windows.show([[]]),
        lambda: windows.trim([]),
        lambda: windows.backed(),
        lambda: windows.home(0),
        lambda: windows.window(0),
        lambda: windows.shown(0),
        lambda: windows.stats(),
        lambda: windows.check(),
        lambda: windows.close(),
    ]
