"""`make_app`: the ASGI application over an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import vattn

from ..async_engine import AsyncEngine
from ..core import EngineCore
from . import admin, chat, completions, dashboard, tokens
from .announcer import Announcer
from .bodies import body_schemas
from .entrance import Entrance
from .errors import add_handlers
from .limits import Limits
from .prometheus import Exporter
from .protocol import ErrorResponse
from .service import Service
from .settings import ServerSettings
from .state import StateReader

_ERRORS = {
    400: "a value that is not possible or not supported, or a context that is too long",
    401: "a key is missing or wrong",
    404: "an unknown model",
    413: "the body is too large",
    500: "the request failed",
    503: "the queue is full, the engine takes no requests, or no process can be started to try a grammar",
}


def make_service(core: EngineCore, settings: ServerSettings, root: str) -> Service:
    """An engine over `core`, and what the endpoints need of it; to be shut down with the engine.

    Args:
        root: the model as the operator gave it, and its name unless the settings have others.
    """
    name = settings.served_model_name[0] if settings.served_model_name else root
    loaded = core.loaded
    longest = max(map(len, loaded.tokenizer.get_vocab())) if loaded.tokenizer is not None else 0
    body_bytes = None if settings.max_body_bytes is None else int(settings.max_body_bytes)
    limits = Limits.of(loaded.max_model_len, longest, body_bytes)
    engine = AsyncEngine(core, max_num_queued_reqs=settings.max_num_queued_reqs, max_waiting_logprobs=limits.logprobs)
    metrics = Exporter(engine, name)
    return Service(engine, settings, metrics, StateReader(engine, metrics, name), root=root, limits=limits)


def make_app(service: Service) -> FastAPI:
    """The application; the engine is shut down when it ends, and what then still runs is aborted."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()
            await service.engine.shutdown(timeout=0)

    settings = service.settings
    app = FastAPI(
        title="vattn",
        version=vattn.__version__,
        lifespan=lifespan,
        # The pages of FastAPI load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        responses={status: {"model": ErrorResponse, "description": text} for status, text in _ERRORS.items()},
    )
    for room in (completions, chat, tokens, admin):
        app.include_router(room.router(service))
    if settings.dashboard:
        app.include_router(dashboard.router(service))
    add_handlers(app)
    app.add_middleware(Announcer, engine=service.engine)
    app.add_middleware(Entrance, settings=settings, most_body_bytes=service.limits.body_bytes)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        """FastAPI's description, with bodies and streams, and without the 422 that this server never answers."""
        document = describe()
        document["components"]["schemas"] |= body_schemas()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            content = document["paths"][path]["post"]["responses"]["200"]["content"]
            content.setdefault("text/event-stream", {})  # a schema is read as one of the whole, or of each event
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app
