"""Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from vattn.errors import ConfigError, VattnError
from vattn.integers import shown

from ..async_engine import EngineStopped, QueueFull
from ..requests.grammar import CannotGoOn
from ..requests.grammar_compiler import GrammarsUnavailable
from ..requests.request import ContextTooLong, InvalidRequest

logger = logging.getLogger(__name__)

# Messages may quote what a client sent.
LONGEST_MESSAGE = 600
RETRY_AFTER = {"Retry-After": "1"}
_NAME = re.compile(r"\w+")
_KINDS = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        param: the field that is wrong, where it is one.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:LONGEST_MESSAGE]}..."
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, default)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client left before there was an answer."""


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong as it is."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """What a client is told of an error; of one that is not meant for clients, only its type."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(503, str(error), code="queue_full", headers=RETRY_AFTER)
        case GrammarsUnavailable():
            return ApiError(503, str(error), code="grammars_unavailable", headers=RETRY_AFTER)
        case EngineStopped():
            return ApiError(503, "the engine has stopped and takes no requests", code="engine_stopped")
        case InvalidRequest() | ConfigError():
            too_long = isinstance(error, ContextTooLong)
            return bad(str(error), error.param, "context_length_exceeded" if too_long else None)
        case CannotGoOn():
            return bad(str(error))
        case ClientGone():
            return ApiError(499, "the client left")  # which nobody reads
        case VattnError():
            return ApiError(500, f"the request failed: {error}")
    return ApiError(500, f"the request failed: {type(error).__name__}; the server's log has more")


def bad_field(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first wrong field, and what pydantic says of it.

    A field that may have one of several forms has an error for each of them: the form that got furthest tells most.
    """

    def path(error: Mapping[str, Any]) -> list[str | int]:
        # The name of a form is a type's: str, constrained-str, list[int].
        return [part for part in error["loc"] if isinstance(part, int) or (part != "str" and _NAME.fullmatch(part))]

    def progress(path: list[str | int]) -> list[int]:
        return [part if isinstance(part, int) else -1 for part in path]

    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    where = max(map(path, same), key=progress)
    there = [error for error in same if path(error) == where]
    message = ", or ".join(dict.fromkeys(str(error["msg"]) for error in there))
    value = there[0].get("input")
    if isinstance(value, int | float) and not isinstance(value, bool):  # others may be long, or private
        message += f"; it is {shown(value)}"
    name = ".".join(map(str, where))[:80]
    return bad(f"{name}: {message}" if name else message, str(where[0]) if where else None)


def _listed(value: object) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_listed)
_MEMBERS = 64  # of a list, written at a time
# Ends of lines for str.splitlines, which clients read events with; JSON leaves them as they are.
_LINE_ENDS = {mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}


def _json(value: object) -> str:
    """JSON in one line, whatever ends a line."""
    text = _encoder.encode(value)
    if not text.isascii():
        for mark, escape in _LINE_ENDS.items():
            text = text.replace(mark, escape)
    return text


def encode(value: object) -> bytes:
    """JSON; an iterator is a list, and text that no encoding has is replaced."""
    return _json(value).encode("utf-8", "replace")


def pieces(value: object, depth: int = 0) -> Iterator[str]:
    """As `encode`, in pieces that each take little time; members of iterators are made as they are written.

    Args:
        depth: of dicts that the value is in; small ones, such as the report of a token, are further in than three.
    """
    if isinstance(value, dict) and depth < 3:
        opening = "{"
        for key, member in value.items():
            yield f"{opening}{_json(key)}:"
            yield from pieces(member, depth + 1)
            opening = ","
        yield "}" if opening == "," else "{}"
    elif isinstance(value, list | Iterator):
        members = iter(value)
        opening = "["
        while batch := list(islice(members, _MEMBERS)):
            if depth < 3 and any(isinstance(member, dict | list) for member in batch):
                for member in batch:
                    yield opening
                    yield from pieces(member, depth)
                    opening = ","
            else:
                yield f"{opening}{_json(batch)[1:-1]}"
                opening = ","
        yield "]" if opening == "," else "[]"
    else:
        yield _json(value)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, dict(headers or {}), media_type="application/json")


def error_response(error: BaseException) -> Response:
    found = api_error(error)
    return json_response(found.body, found.status, found.headers)


def log_failure(error: Exception, request_id: str) -> None:
    """Log an error that a client is told as status 500; an `ApiError` has been logged where it was made."""
    if not isinstance(error, ApiError) and api_error(error).status == 500:
        logger.error("a request failed", exc_info=error, extra={"fields": {"request_id": request_id}})


def add_handlers(app: FastAPI) -> None:
    """Answer every error of an endpoint in one shape."""

    async def known(request: Request, error: Exception) -> Response:
        log_failure(error, request.scope["request_id"])
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> Response:
        """A parameter of the query; bodies are read by `Bodies`."""
        assert isinstance(error, RequestValidationError)
        return error_response(bad_field([{**each, "loc": each["loc"][1:]} for each in error.errors()]))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))

    for kind in (ApiError, ClientGone, VattnError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
