"""What operators and load balancers ask: models, health, metrics, version, load; and what changes the engine."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

import vattn
from vattn.errors import VattnError

from ..async_engine import EngineStopped
from .errors import json_response
from .protocol import LoadResponse, ModelCard, ModelList, SleepingResponse, VersionResponse
from .service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    engine = service.engine

    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "vattn",
            "root": service.root,
            "max_model_len": service.max_model_len,
        }

    @routes.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """The model, once for each of its names."""
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    @routes.get("/v1/models/{name:path}", response_model=ModelCard)
    async def model(name: str) -> Response:
        if not name:  # only a slash behind it
            return await models()
        service.check_model(name)
        return json_response(card(name))

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", response_class=Response)
    async def health(request: Request, memory: Annotated[bool, Query()] = False) -> Response:
        """Empty, 200 while the engine lives; with `memory=1`, or asked for JSON, what the cache holds."""
        if engine.dead:
            raise EngineStopped
        if memory or request.headers.get("accept") == "application/json":
            state = await service.state.read()
            return json_response({"status": "ok", "memory": state["memory"], "counts": state["counts"]})
        return Response(status_code=200)

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        with suppress(VattnError):  # the engine is gone; the counters are still there
            await service.state.read()
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version", response_model=VersionResponse)
    async def get_version() -> Response:
        return json_response({"version": vattn.__version__})

    @routes.get("/load", response_model=LoadResponse)
    async def load() -> Response:
        """Unfinished requests; each of `n` choices counts."""
        return json_response({"server_load": engine.num_unfinished})

    if service.settings.admin_endpoints:
        routes.include_router(_changes(service))
    return routes


def _changes(service: Service) -> APIRouter:
    """What concerns every client."""
    routes = APIRouter()
    engine = service.engine

    @routes.post("/reset_prefix_cache", response_class=Response)
    async def reset_prefix_cache(reset_running_requests: Annotated[bool, Query()] = False) -> Response:
        """Forget all cached prefixes; those that running requests use only with `reset_running_requests`."""
        await engine.reset_prefix_cache(reset_running_requests)
        return Response(status_code=200)

    @routes.post("/sleep", response_class=Response)
    async def sleep(level: Annotated[int, Query()] = 1) -> Response:
        """Give the cache's memory back to the machine; requests wait until `/wake_up`."""
        await engine.sleep(level)
        return Response(status_code=200)

    @routes.post("/wake_up", response_class=Response)
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """End `/sleep`. Only the cache sleeps: with `tags`, nothing happens unless `kv_cache` is one of them."""
        await engine.wake_up(tags)
        return Response(status_code=200)

    @routes.get("/is_sleeping", response_model=SleepingResponse)
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await engine.is_sleeping()})

    return routes
