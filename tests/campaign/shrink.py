"""Makes a failing scenario shorter and simpler, as long as it fails in the same way (delta debugging)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.campaign.operations import Operation
from tests.campaign.world import Config

Fails = Callable[[Config, Sequence[Operation]], bool]

_PLAIN: dict[str, Any] = {
    "overlap": False,
    "deferred_reclamation": True,
    "eager_pages": 0,
    "watermark": 0.0,
    "guard_rows": 0,
    "guard": "zero",
    "layout": "layer",
    "kv_order": "NHD",
    "dtype": "float32",
}


def shrink(
    config: Config, operations: Sequence[Operation], fails: Fails, *, seconds: float = 60
) -> tuple[Config, list[Operation]]:
    """The least that fails, as far as it is found in the time given."""
    end = time.monotonic() + seconds
    best, left = config, list(operations)

    def attempt(config: Config, operations: list[Operation]) -> bool:
        nonlocal best, left
        if time.monotonic() > end or not fails(config, operations):
            return False
        best, left = config, operations
        return True

    changed = True
    while changed and time.monotonic() < end:
        changed = _drop(lambda kept: attempt(best, kept), lambda: left)
        for i in reversed(range(len(best.caches))):
            if len(best.caches) > 1:
                others = [op.moved(-(op.cache > i)) for op in left if op.cache != i]
                changed |= attempt(replace(best, caches=best.caches[:i] + best.caches[i + 1 :]), others)
        for simpler in _configs(lambda: best):
            changed |= attempt(simpler, left)
        for i in range(len(left)):
            for operation in left[i].simpler():
                if attempt(best, [*left[:i], operation, *left[i + 1 :]]):
                    changed = True
                    break
    return best, left


def _drop(attempt: Callable[[list[Operation]], bool], left: Callable[[], list[Operation]]) -> bool:
    """Leaves operations out, halves first, then fewer at a time."""
    changed = False
    size = max(1, len(left()) // 2)
    while True:
        end = len(left())
        while end > 0:
            kept = left()
            if attempt(kept[: max(0, end - size)] + kept[end:]):
                changed = True
            end -= size
        if size == 1:
            return changed
        size //= 2


def _configs(best: Callable[[], Config]) -> Iterator[Config]:
    """Simpler configurations, each from the best one so far."""
    if best().every != 1:
        yield replace(best(), every=1)
    if best().delay:
        yield replace(best(), delay=0.0)
    if len(best().fail) > 1:
        for i in range(len(best().fail)):
            yield replace(best(), fail=best().fail[:i] + best().fail[i + 1 :])
    if best().own:
        yield replace(best(), own=False)
    if best().books:
        yield replace(best(), books=False)
    if best().table and not best().fail and not best().delay:
        yield replace(best(), table=False)
    for i in range(len(best().caches)):
        for name, plain in _PLAIN.items():
            if best().caches[i].get(name, plain) != plain:
                yield _with(best(), i, {name: plain})
        for g in range(len(best().caches[i]["groups"])):
            groups = best().caches[i]["groups"]
            if len(groups) > 1 and g < len(groups):
                yield _with(best(), i, {"groups": groups[:g] + groups[g + 1 :]})
            groups = best().caches[i]["groups"]
            if g < len(groups):
                for name in ("v_head_dim", "dtype"):
                    if name in groups[g]:
                        less = {key: value for key, value in groups[g].items() if key != name}
                        yield _with(best(), i, {"groups": [*groups[:g], less, *groups[g + 1 :]]})
                groups = best().caches[i]["groups"]
                if len(groups[g]["layers"]) > 1:
                    less = groups[g] | {"layers": groups[g]["layers"][:1]}
                    yield _with(best(), i, {"groups": [*groups[:g], less, *groups[g + 1 :]]})
        for pages in (1024, best().pool_pages):
            if best().caches[i]["memory_budget"] != (budget := pages * best().page_size):
                yield replace(_with(best(), i, {"memory_budget": budget}), pool_pages=max(pages, best().pool_pages))


def _with(config: Config, number: int, changes: dict[str, Any]) -> Config:
    caches = list(config.caches)
    caches[number] = caches[number] | changes
    return replace(config, caches=tuple(caches))
