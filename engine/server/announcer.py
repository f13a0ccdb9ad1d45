"""`Announcer`: tells the engine which requests are on their way to it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ..async_engine import AsyncEngine

_GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})


class Announcer:
    """An ASGI middleware that announces a request before its body is read and its prompt tokenized."""

    def __init__(self, app: ASGIApp, engine: AsyncEngine) -> None:
        self.app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _GENERATING:
            with self._engine.announce():
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)
