"""`Entrance`: what every HTTP request passes first: its id, the key, the limit on its body, the log."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_response
from .settings import ServerSettings

logger = logging.getLogger(__name__)

# What load balancers and scrapers ask for, what describes the server, and the files of the dashboard, which a browser
# loads without a key and which say nothing of the server; all else needs a key, if there are keys.
OPEN = frozenset(
    {
        *("/health", "/metrics", "/version", "/load", "/openapi.json"),
        *("/dashboard", "/dashboard/dashboard.css", "/dashboard/dashboard.js"),
    }
)
_QUIET = frozenset({"/health", "/metrics"})  # asked for every few seconds
_DRAIN_SECONDS = 10
_REQUEST_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


class Entrance:
    """An ASGI middleware; puts the request's id into its scope as `request_id`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, most_body_bytes: int) -> None:
        self.app = app
        self._keys = [_digest(key.encode()) for key in settings.api_key]
        self._limit = most_body_bytes
        self._logs = not settings.disable_log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.monotonic()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        scope["request_id"] = request_id
        status = 0
        received = 0
        # A connection that is closed before all of a body has been read is reset, and the answer may be lost with it.
        # A client that waits for "100 Continue" sends none.
        to_drain = _closes(scope, headers) and b"expect" not in headers

        async def limited() -> Message:
            nonlocal received, to_drain
            message = await receive()
            to_drain &= message.get("more_body", False)
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit:
                    raise self._too_large()
            return message

        async def named(message: Message) -> None:
            nonlocal status, to_drain
            if message["type"] == "http.response.start":
                if message["status"] >= 400 and to_drain:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_DRAIN_SECONDS):
                            while to_drain:
                                to_drain = (await receive()).get("more_body", False)
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await error_response(refusal)(scope, limited, named)
            else:
                await self.app(scope, limited, named)
        except Exception as error:
            logger.error("a request failed", exc_info=error, extra={"fields": {"request_id": request_id}})
            if not status:
                await error_response(error)(scope, limited, named)
        finally:
            if self._logs and scope["path"] not in _QUIET:
                fields = {
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"][:200],
                    "status": status,  # 0: the client left before there was one
                    "seconds": round(time.monotonic() - start, 4),
                }
                logger.info("request", extra={"fields": fields})

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._keys and path not in OPEN and not self._has_key(headers.get(b"authorization", b"")):
            message = "a key is missing or wrong; send 'Authorization: Bearer KEY'"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._limit:
            return self._too_large()
        return None

    def _has_key(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, in a time that does not depend on what they have in common.
        found = [hmac.compare_digest(digest, known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(found)

    def _too_large(self) -> ApiError:
        message = f"the body is over the limit of {self._limit} bytes; send less, or raise --max-body-bytes"
        return ApiError(413, message, code="body_too_large")


def _closes(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Whether the connection ends with the answer."""
    return scope["http_version"] == "1.0" or b"close" in headers.get(b"connection", b"").lower()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(given: bytes) -> str:
    """The client's own id, if it fits into a header and a log; else a new one."""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else uuid.uuid4().hex
