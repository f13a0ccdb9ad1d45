"""The two engines of mode `roles`, each in a process that is told what to do."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.campaign.broker import NAME
from tests.campaign.forked import PATIENCE, Wrong
from tests.support.tiny_models import make_smallest_model
from vattn.engine import LLM, AsyncEngine, SamplingParams
from vattn.engine.roles import prefiller as prefilling
from vattn.engine.roles.line import Kind, message
from vattn.errors import ConfigError

BUDGET = 2 * 2**20  # bytes of the pool
CONTEXT = 220
CHUNK = 48  # tokens of a step
BLOCKS = {4096: 16, 16384: 64}  # tokens of a block by page size


@dataclass
class Request:
    """A request.

    Attributes:
        abort_after: so many steps; None for never.
    """

    prompt: list[int]
    salt: str
    max_tokens: int
    abort_after: int | None


Answers = tuple[list[list[int] | str | None], Counter[str]]


def prefill(page_size: int, seed: int, garbles: float, pipe: Connection) -> None:
    """Computes prompts.

    Args:
        garbles: which part of the rows that it sends is something else.
    """
    before = _held()
    if garbles:
        _garble(random.Random(seed), garbles)
    asyncio.run(_prefill(_engine("prefill", page_size), pipe))
    _leave(before, pipe)


async def _prefill(llm: LLM, pipe: Connection) -> None:
    async with AsyncEngine(llm) as engine:
        pipe.send((None, True))
        while (await asyncio.to_thread(pipe.recv))[0] != "leave":
            await asyncio.to_thread(_wait, "a prefiller has requests of nobody", lambda: not llm.core.num_groups)
            await engine.call(llm.check)
            pipe.send((None, True))


def _garble(rng: random.Random, part: float) -> None:
    """Rows come otherwise than they are: changed on the way, of other tokens, or cut off."""

    def garbled(kind: Kind, job: int = 0, **fields: Any) -> bytes:
        if "rows" not in fields or rng.random() >= part:
            return message(kind, job, **fields)
        noise = [memoryview(rng.randbytes(len(each))) for each in fields["rows"]]
        how = rng.randrange(3)
        if how == 0:  # whole, and with the digest of what it was
            size = sum(map(len, noise))
            digest = message(kind, job, **fields)[-16:] if size else b""
            return message(kind, job, **{**fields, "rows": noise})[: -16 or None] + digest
        if how == 1:
            tokens = [token ^ 1 for token in fields["tokens"]]
            return message(kind, job, **{**fields, "rows": noise, "tokens": tokens})
        return message(kind, job, **fields)[:-20]

    prefilling.message = garbled  # type: ignore[assignment]


def decode(page_size: int, pipe: Connection) -> None:
    """Continues prompts."""
    before = _held()
    with _engine("decode", page_size) as llm:
        pipe.send((None, True))
        while (told := pipe.recv())[0] != "leave":
            if told[0] == "play":
                pipe.send((None, _play(llm, told[1], random.Random(told[2]))))
            elif told[0] == "prefillers":
                assert llm.core.remote is not None
                pipe.send((None, llm.core.remote.prefillers))
            else:
                llm.check()
                pipe.send((None, True))
    _leave(before, pipe)


def _play(llm: LLM, asked: list[Request], rng: random.Random) -> Answers:
    """The answers, an error instead of tokens, and None for what was aborted; and what came up."""
    remote = llm.core.remote
    assert remote is not None
    before = Counter(handed=remote.handed, lost=remote.lost, rows=remote.row_tokens)
    answers: list[list[int] | str | None] = [None] * len(asked)
    left = dict(enumerate(asked))
    to_abort: dict[int, int] = {}
    step = 0
    while left or llm.core.has_unfinished():
        while left and (rng.random() < 0.4 or not llm.core.has_unfinished()):
            number = next(iter(left))
            request = left.pop(number)
            sampling = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
            prompt = {"prompt_token_ids": request.prompt, **({"cache_salt": request.salt} if request.salt else {})}
            llm.add_request(str(number), prompt, sampling)
            if request.abort_after is not None:
                to_abort[number] = step + request.abort_after
        for number in [number for number, when in to_abort.items() if when <= step]:
            del to_abort[number]
            llm.abort(str(number))
        for output in llm.step():
            if output.finished and (reason := output.outputs[0].finish_reason) == "length":
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
            elif output.finished and reason != "abort":
                answers[int(output.request_id)] = f"{reason}: {output.error}"
        step += 1
    after = Counter(handed=remote.handed, lost=remote.lost, rows=remote.row_tokens)
    names = {"handed": "prompts handed over", "lost": "prompts lost", "rows": "rows taken over"}
    return answers, Counter({names[name]: count for name, count in (after - before).items()})


def _engine(role: str, page_size: int) -> LLM:
    """An engine, once there is a broker."""
    logging.getLogger("vattn").setLevel(logging.ERROR)  # a broker that is killed is a warning
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return LLM(
                make_smallest_model(),
                role=role,
                kv_pool=NAME,
                kv_share_prefixes=True,
                kv_options={"page_size": page_size, "layout": "fused"},
                skip_tokenizer_init=True,
                max_model_len=CONTEXT,
                max_num_seqs=4,
                max_num_batched_tokens=CHUNK,
            )
        except ConfigError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _held() -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _leave(before: tuple[int, int], pipe: Connection) -> None:
    """Says that nothing is open that was not open before, and waits."""
    _wait("an engine that was closed leaves descriptors or threads", lambda: _held() <= before)
    pipe.send((None, True))
    pipe.recv()


def _wait(otherwise: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE / 2
    while not condition():
        if time.monotonic() > end:
            raise Wrong(f"{otherwise}: {_held()}")
        time.sleep(0.002)
