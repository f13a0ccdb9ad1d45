"""The other side of `vattn pool`: questions to a broker."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from vattn.broker.places import socket_path
from vattn.broker.wire import Reader, WireError, encode
from vattn.errors import ConfigError, VattnError
from vattn.units import format_bytes

_SECONDS = 10.0  # in which a broker answers


def summary(top: Mapping[str, Any]) -> str:
    """A pool on one line, from the broker's answer to `top`."""
    borrowers = ", ".join(each["name"] + " (lost)" * each["lost"] for each in top["borrowers"]) or "nobody"
    free = format_bytes(max(0, top["free"]))
    return f"{format_bytes(top['budget'])} on {top['device']}, {free} free; borrowed by {borrowers}"


class Control:
    """A connection for `vattn pool`.

    Args:
        seconds: in which the broker has to answer.

    Raises:
        ConfigError: no broker serves the pool.
        VattnError: it does not answer.
    """

    def __init__(self, name: str, *, seconds: float = _SECONDS) -> None:
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(seconds)
        self._reader = Reader()
        try:
            self._socket.connect(str(socket_path(name)))
        except BlockingIOError as error:  # too many wait to connect
            self._socket.close()
            raise VattnError(f"the broker of {name!r} does not answer: {error}") from error
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"no broker serves the pool {name!r}; vattn pool serve {name} --budget SIZE") from error

    def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        """The broker's answer.

        Raises:
            ConfigError: it refuses.
            VattnError: it does not answer.
        """
        try:
            self._socket.sendall(encode(kind, **fields))
            while data := self._socket.recv(2**16):
                for message in self._reader.feed(data):
                    if message["kind"] == "refused":
                        raise ConfigError(message["why"])
                    result: dict[str, Any] = message["result"]
                    if "refused" in result:
                        raise ConfigError(result["refused"])
                    return result
        except (OSError, WireError) as error:
            raise VattnError(f"the broker of {self._name!r} does not answer: {error}") from error
        raise VattnError(f"the broker of {self._name!r} has ended")

    def close(self) -> None:
        self._socket.close()
