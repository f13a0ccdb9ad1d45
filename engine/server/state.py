"""The live state of a server, as JSON: what `/dashboard`, `/health?memory=1` and `/metrics` show of the cache.

It is sampled between steps, on the engine thread, at most four times a second, however many ask.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from vattn.errors import VattnError

from ..async_engine import AsyncEngine
from ..core import EngineCore
from ..kv.base import SlotView
from ..metrics import usage
from ..requests.request import Request
from .pool_reader import PoolReader
from .prometheus import Exporter

_MOST_REQUESTS = 256  # those that run come first
_MOST_BLOCKS = 16_384  # numbers of blocks in one state
_SHORTEST_AGE = 0.25
_LONGEST_WAIT = 2.0  # for a step; then the last state is shown again


class StateReader:
    """Looks at an engine on behalf of many.

    The state, all of it JSON, without text or tokens of any prompt:

        time            seconds since the epoch
        model, kv       name of the model, and of the KV backend
        sleeping        whether the engine sleeps
        counts          running, waiting
        requests        id, state, slot, prompt_tokens, output_tokens, computed_tokens, cached_tokens, priority,
                        age_seconds, preemptions; at most 256, running ones first
        rates           prompt_tokens and generation_tokens per second, since the last look
        ttft_seconds    p50, p99 and count of the requests that ended last; null without one
        memory          usage (0 to 1), reserved_bytes, physical_bytes, peak_physical_bytes, used_bytes, live_bytes,
                        static_bytes and paged_bytes: what other allocators would hold for the running requests;
                        pages: budget, owned, parked, cached, shared, other, free (virtual)
        slots           per slot with memory, in tokens: slot, active, length, mapped, shared (at its start);
                        prefix: the same number in slots that share their start, null in the others;
                        paged: blocks, too: the numbers of its blocks in the pool, at most 16,384 of all slots
        pool            paged: blocks, how many there are; cached, the numbers of those that no request holds
        block_tokens    tokens of a block of the prefix cache
        slot_tokens     tokens that a slot can hold
        driver          map_calls, unmap_calls, waits, wait_seconds
        kv_pool         with a pool that a broker lends, else null: name; borrower, what the broker calls this engine;
                        reachable, whether the broker answers; budget, free: bytes of the pool; kept: of cached prefixes
                        whose engine has ended; and of each of the borrowers name, lost (its connection), and in bytes
                        at_least, at_most, lease, owned, parked, cached, shared (of others' prefixes), asked (wanted
                        back now), asked_back (given back so far). Without an answer, free is null and borrowers is
                        empty
    """

    def __init__(self, engine: AsyncEngine, metrics: Exporter, model: str) -> None:
        self._engine = engine
        self._metrics = metrics
        self._model = model
        self._last: dict[str, Any] | None = None
        self._at = 0.0
        self._tokens = (0, 0)
        self._looking: asyncio.Task[dict[str, Any]] | None = None
        loan = engine.core.kv.loan
        self._pool = None if loan is None else PoolReader(loan.pool)

    async def read(self) -> dict[str, Any]:
        """The state now, or up to a quarter of a second ago; older where a step takes long.

        Raises:
            EngineStopped: the engine stopped before anybody looked.
        """
        if self._last is not None and time.monotonic() - self._at < _SHORTEST_AGE:
            return self._last
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        await asyncio.wait({self._looking}, timeout=None if self._last is None else _LONGEST_WAIT)
        if self._looking.done():
            try:
                return self._looking.result()
            except VattnError:  # the engine or its cache is closed
                if self._last is None:
                    raise
        assert self._last is not None
        return self._last

    async def _look(self) -> dict[str, Any]:
        core = self._engine.core
        held = await self._engine.call(lambda: look(core))
        loan = core.kv.loan
        held["kv_pool"] = None if loan is None or self._pool is None else await self._pool.read(loan)
        now = time.monotonic()
        figures = core.figures
        tokens = figures.prompt_tokens, figures.generation_tokens
        seconds = now - self._at
        rates = [(new - old) / seconds if self._at else 0.0 for new, old in zip(tokens, self._tokens, strict=True)]
        self._tokens, self._at = tokens, now
        self._metrics.held = held
        self._last = {
            "time": time.time(),
            "model": self._model,
            **held,
            "rates": {"prompt_tokens": rates[0], "generation_tokens": rates[1]},
            "ttft_seconds": _percentiles(figures.recent_ttfts()),
        }
        return self._last


def look(core: EngineCore) -> dict[str, Any]:
    """What an engine holds; on the thread that steps it."""
    scheduler, kv = core.scheduler, core.kv
    now = time.monotonic()
    requests = [*scheduler.running, *scheduler.waiting]
    stats, found = kv.stats(), kv.describe()
    lengths = [request.num_computed_tokens for request in scheduler.running]
    block = core.config.block_size
    state: dict[str, Any] = {
        "kv": kv.name,
        "sleeping": core.asleep,
        "counts": {"running": len(scheduler.running), "waiting": len(scheduler.waiting)},
        "requests": [
            {
                "id": request.request_id,
                "state": request.state.value,
                "slot": request.slot,
                "prompt_tokens": len(request.prompt_token_ids),
                "output_tokens": len(request.output_token_ids),
                "computed_tokens": request.num_computed_tokens,
                "cached_tokens": request.num_cached_tokens,
                "priority": request.priority,
                "age_seconds": round(now - request.arrival_time, 3),
                "preemptions": request.num_preemptions,
            }
            for request in requests[:_MOST_REQUESTS]
        ],
        "memory": {
            "usage": usage(kv),
            "reserved_bytes": stats.reserved_bytes,
            "physical_bytes": stats.physical_bytes,
            "peak_physical_bytes": stats.peak_physical_bytes,
            "used_bytes": stats.used_bytes,
            "live_bytes": stats.live_bytes,
            "static_bytes": len(lengths) * core.loaded.max_model_len * kv.token_bytes,
            "paged_bytes": sum(-(-length // block) * block for length in lengths) * kv.token_bytes,
        },
        "slots": _slots(found.slots, scheduler.running),
        "block_tokens": kv.prefix_block_tokens,
        "slot_tokens": core.loaded.max_model_len,
        "driver": {
            "map_calls": stats.map_calls,
            "unmap_calls": stats.unmap_calls,
            "waits": stats.waits,
            "wait_seconds": stats.wait_seconds,
        },
    }
    if found.pages is not None:
        state["memory"]["pages"] = dict(found.pages)
    if found.num_blocks is not None:
        state["pool"] = {"blocks": found.num_blocks, "cached": found.cached_blocks[:_MOST_BLOCKS]}
    _name_prefixes(scheduler.running, state)
    return state


def _slots(slots: Sequence[SlotView], running: Sequence[Request]) -> list[dict[str, Any]]:
    lengths = {request.slot: request.num_computed_tokens for request in running}
    room = _MOST_BLOCKS
    shown = []
    for each in slots:
        slot: dict[str, Any] = {
            "slot": each.slot,
            "active": each.active,
            "length": lengths.get(each.slot, 0),
            "mapped": each.mapped,
        }
        slot |= {"shared": each.shared, "prefix": None}
        if each.blocks is not None:
            slot["blocks"] = each.blocks[:room]
            room = max(0, room - len(each.blocks))
        shown.append(slot)
    return shown


def _name_prefixes(running: Sequence[Request], state: dict[str, Any]) -> None:
    """Number the prefixes that several requests share; those are the same prefix that share its first block."""
    firsts = {
        request.slot: (
            request.cache_salt,
            request.first_ids(min(state["block_tokens"], len(request.prompt_token_ids))).tobytes(),
        )
        for request in running
    }
    numbers: dict[tuple[bytes, bytes], int] = {}
    for slot in state["slots"]:
        if slot["shared"] and slot["slot"] in firsts:
            slot["prefix"] = numbers.setdefault(firsts[slot["slot"]], len(numbers))


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ranked = sorted(values)
    return {
        "count": len(ranked),
        "p50": ranked[len(ranked) // 2],
        "p99": ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)],
    }
