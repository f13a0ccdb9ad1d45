"""From the bytes of a request's body to a checked body, in time and memory that its limits bound."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect

from .errors import ClientGone, bad, bad_field
from .limits import Limits
from .workers import SMALL_BYTES, Check, Workers

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

_MARKS = (b",", b":", b"[", b"{")
_IN_STRING = re.compile(rb'(?:[^"\\]+|\\.)*+', re.DOTALL)
_STRETCH = 2**16  # bytes that are searched without a look at other threads
# Python takes quadratic time for longer ones.
_MOST_DIGITS = 640
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


class Bodies:
    """Reads bodies."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.workers = Workers()

    async def read(self, request: Request, kind: type[B], use: Callable[[B, Check], T]) -> T:
        """What `use` makes of the body of a request; in a thread, where it may take its time.

        Raises:
            ApiError: 400, the body is not one of this kind.
            ClientGone: the client left.
        """
        if not _is_json(request.headers.get("content-type", "")):
            raise bad("the body is no JSON object; send one, with the header 'Content-Type: application/json'")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise bad("the body is compressed, as its header 'Content-Encoding' says; send it as it is")
        received = bytearray()
        try:
            async for chunk in request.stream():
                received += chunk
        except ClientDisconnect:
            raise ClientGone from None
        held = [received]  # so that the bytes are free before they are used
        size = len(received)
        del received

        def work(check: Check) -> T:
            value = parse(held.pop(), self._limits.values)
            check()
            if not isinstance(value, dict):
                raise bad("the body is no JSON object; send one, with the header 'Content-Type: application/json'")
            try:
                body = kind.model_validate(value)
            except ValidationError as error:
                raise bad_field(error.errors(include_url=False, include_context=False)) from None
            del value
            check()
            return use(body, check)

        return await self.workers.run(request, size, work)


_REF = "#/components/schemas/{model}"
_described: set[type[BaseModel]] = set()


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """For the OpenAPI document: what the body of an operation is."""
    _described.add(kind)
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas() -> dict[str, Any]:
    """For the OpenAPI document: the schemas of all that were described."""
    kinds: list[Any] = [(kind, "validation") for kind in sorted(_described, key=lambda kind: kind.__name__)]
    schemas: dict[str, Any] = models_json_schema(kinds, ref_template=_REF)[1]["$defs"]
    return schemas


def parse(body: bytes | bytearray, most_values: int) -> Any:
    """The value that a body writes as JSON.

    Raises:
        ApiError: 400, it is no JSON, or has too many values.
    """
    if has_more_values(body, most_values):
        raise bad(f"the body has more than {most_values} values; send less in one request", code="too_many_values")
    # They take their time, so only for what would keep other threads waiting, and where there may be long numbers.
    hooks = len(body) > SMALL_BYTES or b"0" * (_MOST_DIGITS + 1) in body.translate(_ZEROS)
    try:
        text = body.decode("utf-8-sig")
        return json.loads(text, parse_constant=_refuse_constant, **(_HOOKS if hooks else {}))
    except RecursionError:
        raise bad("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise bad(f"the body is no UTF-8, at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise bad(f"the body is no JSON: {error.msg}, at character {error.pos}") from None


def has_more_values(body: bytes | bytearray, most: int) -> bool:
    """Whether JSON has more than so many values, names of fields included; found out before they take memory.

    An empty list or object counts as two.
    """
    # Commas and colons in texts are counted too, so this is the most that there may be.
    if 1 + sum(map(body.count, _MARKS)) <= most:
        return False
    count, place = 1, 0
    for _ in range(most + 1):  # as many texts; without a mark between them they are no JSON, but take time as well
        start = body.find(b'"', place)
        end = len(body) if start < 0 else start
        count += sum(body.count(mark, place, end) for mark in _MARKS)
        if count > most:
            return True
        place = _end_of_string(body, end + 1)
        if place >= len(body):
            return False
    return True


def _end_of_string(body: bytes | bytearray, place: int) -> int:
    """The place after the string that begins before `place`."""
    while place < len(body):
        limit = min(place + _STRETCH, len(body))
        found = _IN_STRING.match(body, place, limit)
        assert found is not None
        if body[found.end() : found.end() + 1] == b'"':
            return found.end() + 1
        # The stretch ended, perhaps between a backslash and what it stands before.
        place = found.end() if found.end() > place else limit
    return place


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise bad(f"the body has a whole number of {len(digits)} digits; it can have at most {_MOST_DIGITS}")
    return int(digits)


def _fraction(digits: str) -> float:
    return float(digits)


def _object(members: dict[str, Any]) -> dict[str, Any]:
    return members


# Wherever Python calls a function of Python's, other threads can run; `json` alone lets none of them until it is done.
_HOOKS: dict[str, Any] = {"parse_int": _whole, "parse_float": _fraction, "object_hook": _object}


def _refuse_constant(name: str) -> NoReturn:
    raise bad(f"the body has {name}, which JSON does not have")
