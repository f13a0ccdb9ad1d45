"""Mutations of the server."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.campaign.mutations import mutation
from vattn.engine.server import bodies, connections, limits, logs, service


def _limit(name: str) -> None:
    true = limits.Limits.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[limits.Limits], *args: Any) -> limits.Limits:
        return dataclasses.replace(true(cls, *args), **{name: 10**9})

    limits.Limits.of = classmethod(of)  # type: ignore[method-assign, assignment]


@mutation(None, "texts of any length are tokenized", "server")
def any_characters() -> None:
    _limit("characters")


@mutation(None, "bodies have any number of values", "server")
def any_values() -> None:
    _limit("values")


@mutation(None, "answers report any number of log probabilities", "server")
def any_logprobs() -> None:
    _limit("logprobs")


@mutation(None, "what a client that left has asked for goes on", "server")
def no_abort() -> None:
    service.Run.abort = lambda self: None  # type: ignore[method-assign]


@mutation(None, "a half-closed connection is closed", "server")
def no_half_closed() -> None:
    connections.LimitedProtocol.eof_received = lambda self: None  # type: ignore[method-assign, assignment]


@mutation(None, "a half-closed client is asked only once whether it is there", "server")
def asked_once() -> None:
    connections._LOOKS = 1 << 62


@mutation(None, "of the requests that a client sends ahead only the last one is told that it left", "server")
def only_the_last_is_told() -> None:
    true = connections.LimitedProtocol.connection_lost

    def connection_lost(self: connections.LimitedProtocol, error: Exception | None) -> None:
        self._cycles = []
        true(self, error)

    connections.LimitedProtocol.connection_lost = connection_lost  # type: ignore[method-assign]


@mutation(None, "libraries write to standard error on their own", "server")
def plain_log() -> None:
    logs.disable_progress_bars = lambda: None
    logs.transformers.utils.logging.disable_progress_bar = lambda: None  # type: ignore[assignment]


@mutation(None, "a salt has no effect", "server")
def no_salt_of_bodies() -> None:
    true = bodies.Bodies.read

    async def read(self: bodies.Bodies, request: Any, kind: Any, use: Any) -> Any:
        def unsalted(body: Any, check: Any) -> Any:
            if hasattr(body, "cache_salt"):
                body.cache_salt = None
            return use(body, check)

        return await true(self, request, kind, unsalted)

    bodies.Bodies.read = read  # type: ignore[method-assign]
