"""`/dashboard`: a page, and the events that it draws: what a `StateReader` sees, twice a second.

The page is the same for every server and holds nothing of any, so only the events need a key. A browser that opens a
page sends none: the page asks for it, and fetches the events with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from ..async_engine import EngineStopped
from .errors import RETRY_AFTER, ApiError
from .service import Service
from .streams import EventStream, event

MOST_WATCHERS = 32
_PERIOD = 0.5  # seconds between two events
_FILES = {
    "/dashboard": ("dashboard.html", "text/html"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def router(service: Service) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        routes.add_api_route(path, _file(name, media_type), methods=["GET", "HEAD"])
    watchers = _Watchers(service)

    @routes.get("/dashboard/events")
    async def events() -> EventStream:
        """The state, again and again, until the watcher leaves or the engine stops."""
        return watchers.add()

    return routes


class _Watchers:
    """Those who see the state; of each state there is one event for all of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._count = 0
        self._state: dict[str, Any] | None = None
        self._event = b""

    def add(self) -> EventStream:
        """The events for one more.

        Raises:
            ApiError: 503, there are too many.
        """
        if self._count >= MOST_WATCHERS:
            message = f"{MOST_WATCHERS} dashboards are open, the most that this server feeds; close one"
            raise ApiError(503, message, code="too_many_watchers", headers=RETRY_AFTER)
        self._count += 1
        return EventStream(self._events(), self._remove)

    def _remove(self) -> None:
        self._count -= 1

    async def _events(self) -> AsyncGenerator[bytes, None]:
        while not self._service.engine.stopped:
            state = await self._service.state.read()
            if state is not self._state:
                self._state, self._event = state, event(state)
            yield self._event
            await asyncio.sleep(_PERIOD)
        raise EngineStopped


def _file(name: str, media_type: str) -> Callable[[], Response]:
    response = Response(Path(__file__).with_name(name).read_bytes(), media_type=media_type, headers=_HEADERS)

    def send() -> Response:
        return response

    return send
