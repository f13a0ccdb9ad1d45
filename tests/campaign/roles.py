"""An engine that computes prompts and one that continues them, on a pool of a broker; any of the three is stopped and
killed at any instant.

Bursts of requests and events, after each of which all is quiet: then every answer is what the model alone says, and the
books of all agree. In the end nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from tests.campaign.broker import NAME, ask, hurry, serve
from tests.campaign.forked import PATIENCE, Forked, Wrong, play_out
from tests.campaign.play import Played
from tests.campaign.roling import BLOCKS, BUDGET, CHUNK, CONTEXT, Answers, Request, decode, prefill
from tests.support.tiny_models import VOCAB, make_smallest_model
from vattn.broker.places import FOLDER_VARIABLE, folder, socket_path
from vattn.engine.roles import decoder, prefiller

BURSTS = 3
_SALTS = ("", "", "", "one", "two é")


def scenario(rng: random.Random) -> Played:
    """Some bursts."""
    return play(rng.randrange(1 << 30))


def play(seed: int) -> Played:
    """The scenario of a seed; what it does is drawn from that, and how far which process is by then is not."""
    played = Played(lines=["from tests.campaign import roles", f"print(roles.play({seed}).detail)"])
    rng = random.Random(seed)
    make_smallest_model()  # one for all processes
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        os.chmod(path, 0o700)
        patch.setenv(FOLDER_VARIABLE, path)
        hurry(patch)
        for module, name, value in (
            (decoder, "PATIENCE", 1.0),
            (decoder, "_LOOK", 0.02),
            (decoder, "LEAST_TOKENS", rng.choice((4, 17, 64))),
            (prefiller, "BEAT", 0.2),
        ):
            patch.setattr(module, name, value)
        play_out(World(rng, played.counts), played)
    return played


@dataclass
class _Role:
    """An engine's process, and how it is started."""

    name: str
    start: Callable[[], Forked]
    process: Forked


class World:
    """The processes of a scenario."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self.calls = 0
        self._rng, self._counts = rng, counts
        self._page_size = rng.choice(tuple(BLOCKS))
        self._texts = [[rng.randrange(2, VOCAB) for _ in range(CONTEXT)] for _ in range(3)]
        self._broker = self._serve()
        self._prefiller = self._role("the prefiller", self._prefill)
        self._decoder = self._role("the decoder", self._decode)

    def play(self) -> None:
        """Everything."""
        for _ in range(BURSTS):
            self._burst()
            self._calm()
        self._end()

    def close(self) -> None:
        """Kills everything."""
        for each in (self._decoder.process, self._prefiller.process, self._broker):
            with contextlib.suppress(Wrong):
                each.forget()

    # Processes

    def _serve(self) -> Forked:
        made = Forked("the broker", partial(serve, NAME, BUDGET, 0.0))
        made.answer()
        return made

    def _role(self, name: str, start: Callable[[], Forked]) -> _Role:
        return _Role(name, start, start())

    def _prefill(self) -> Forked:
        garbles = self._rng.choice((0.0, 0.0, 0.3))
        return self._fork("the prefiller", partial(prefill, self._page_size, self._rng.randrange(1 << 30), garbles))

    def _decode(self) -> Forked:
        return self._fork("the decoder", partial(decode, self._page_size))

    def _fork(self, name: str, work: Callable[[Any], None]) -> Forked:
        after = self._rng.randrange(10_000, 300_000) if self._rng.random() < 0.15 else None
        return Forked(name, work, die_after=after)

    def _restart(self, role: _Role) -> None:
        role.process.forget()
        role.process = role.start()
        self._counts[f"deaths of {role.name}"] += 1

    def _kill_broker(self) -> None:
        self._broker.forget()
        self._counts["kills of brokers"] += 1
        self._sleep(0.2)
        self._broker = self._serve()

    def _stop(self, process: Forked) -> None:
        """Sometimes for longer than the decoder has patience."""
        process.signal(signal.SIGSTOP)
        self._sleep(self._rng.choice((0.2, 2.0)))
        process.signal(signal.SIGCONT)
        self._counts["stops"] += 1

    def _stop_broker(self) -> None:
        self._stop(self._broker)

    def _sleep(self, seconds: float) -> None:
        time.sleep(self._rng.random() * seconds)

    # Bursts

    def _burst(self) -> None:
        """Requests, and what disturbs them meanwhile."""
        rng = self._rng
        self._await(self._prefiller)
        self._await(self._decoder)
        asked = [self._request() for _ in range(rng.randrange(2, 9))]
        process = self._decoder.process
        process.tell("play", asked, rng.randrange(1 << 30))
        self.calls += len(asked)
        events = []
        for _ in range(rng.randrange(4)):
            self._sleep(0.2)
            event = rng.choice(
                (
                    partial(self._restart, self._prefiller),
                    partial(self._restart, self._prefiller),
                    partial(self._restart, self._decoder),
                    self._kill_broker,
                    partial(self._stop, self._prefiller.process),
                    partial(self._stop, self._decoder.process),
                    self._stop_broker,
                )
            )
            events.append(event)
            event()
        if self._decoder.process is process:
            self._judge(asked, process.answer(), events)

    def _request(self) -> Request:
        """A prompt that begins as others do, and ends near the end of a block or a chunk."""
        rng = self._rng
        unit = rng.choice((BLOCKS[self._page_size], CHUNK))
        length = min(max(1, unit * rng.randrange(1, CONTEXT // unit) + rng.randrange(-2, 3)), CONTEXT - 20)
        shared = rng.randrange(length + 1) if rng.random() < 0.5 else length
        prompt = rng.choice(self._texts)[:shared] + [rng.randrange(2, VOCAB) for _ in range(length - shared)]
        abort = rng.randrange(12) if rng.random() < 0.15 else None
        return Request(prompt, rng.choice(_SALTS), rng.randrange(1, 20), abort)

    def _judge(self, asked: list[Request], answered: Answers | None, events: list[Callable[[], None]]) -> None:
        """Compares with the model's own choices, of one pass without a cache. Without a broker memory may run out."""
        if answered is None:
            return  # it has killed itself
        answers, counts = answered
        self._counts += counts
        for request, tokens in zip(asked, answers, strict=True):
            if tokens is None:
                if request.abort_after is None:
                    raise Wrong(f"a request has no answer: {request}")
                continue
            if isinstance(tokens, str):
                if "cannot be reached" not in tokens or not {self._kill_broker, self._stop_broker}.intersection(events):
                    raise Wrong(f"a request fails: {tokens}, {request}")
                self._counts["requests without memory, as there is no broker"] += 1
                continue
            ids = torch.tensor([[*request.prompt, *tokens[:-1]]])
            with torch.no_grad():
                logits = make_smallest_model()(ids, use_cache=False).logits[0]
            expected = logits[len(request.prompt) - 1 :].argmax(-1).tolist()
            if tokens != expected or len(tokens) != request.max_tokens:
                raise Wrong(f"wrong tokens: {tokens}, not {expected}, of {request}")

    # Quiet

    def _await(self, role: _Role) -> None:
        """Until it has answered; another one comes for one that has killed itself."""
        role.process.answer()
        while not role.process.lives():
            role.process.check()
            self._restart(role)
            role.process.answer()

    def _calm(self) -> None:
        """Until the engines know each other again, and nothing of the dead is left; then all check their books."""
        for role in (self._prefiller, self._decoder):
            self._await(role)
            role.process.tell("check")
            role.process.answer()
        if not self._wait(lambda: self._all_joined() or not self._all_live()):
            raise Wrong(f"engines do not join again: {ask(self._broker, 'top')}\n{self._said()}")
        if not self._wait(lambda: self._is_asked() or not self._all_live()):
            raise Wrong(f"a prefiller is asked nothing: {_sockets()}\n{self._said()}")
        if not self._wait(lambda: len(_sockets()) <= 1 or not self._all_live()):
            raise Wrong(f"sockets of prefillers that were killed stay: {_sockets()}")
        if (check := ask(self._broker, "check")) is not None and check["problems"]:
            raise Wrong(f"the broker's check: {check['problems']}")

    def _all_joined(self) -> bool:
        top = ask(self._broker, "top")
        return top is not None and sum(not each["lost"] for each in top["borrowers"]) == 2

    def _is_asked(self) -> bool:
        self._decoder.process.tell("prefillers")
        return self._decoder.process.answer() == 1

    def _all_live(self) -> bool:
        return self._decoder.process.lives() and self._prefiller.process.lives()

    def _end(self) -> None:
        """All leave, in any order; then everything is free."""
        roles = [self._prefiller, self._decoder]
        self._rng.shuffle(roles)
        left = []
        for role in roles:
            role.process.tell("leave")
            left.append(role.process.answer())
            role.process.kill()
        if all(left) and _sockets():
            raise Wrong(f"sockets of prefillers that have left stay: {_sockets()}")
        if not self._wait(self._all_free):
            raise Wrong(f"memory is lost: {ask(self._broker, 'top')}")
        if status := self._broker.kill(signal.SIGTERM):
            raise Wrong(f"the broker ends: with {status}\n{self._broker.said()}")
        if socket_path(NAME).exists():
            raise Wrong("the broker leaves its socket:")

    def _all_free(self) -> bool:
        top = ask(self._broker, "reclaim", name=None, stage="cached")  # what has been published outlives its process
        return top is not None and top["free"] == BUDGET

    def _wait(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def _said(self) -> str:
        return "\n".join(each.said() for each in (self._broker, self._prefiller.process, self._decoder.process))


def _sockets() -> list[str]:
    """Of prefillers."""
    return [path.name for path in folder().iterdir() if path.suffix == ".prefill"]
