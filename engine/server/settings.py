"""`ServerSettings`: what a server can be asked for, beyond its engine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vattn.errors import ConfigError
from vattn.integers import shown
from vattn.units import parse_bytes

from ..checks import checked_choice, checked_whole, number
from ..config import Flag

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s\[\]\"',]+|[a-z]+://\[[0-9a-f:.]+\](:\d+)?|null")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def _flag(help: str, **how: Any) -> dict[str, Flag]:
    return {"flag": Flag(help=help, **how)}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server listens, what it accepts, and what it says.

    The fields with a `Flag` are flags of `vattn serve`; those that hold several texts may be repeated there.

    Attributes:
        api_key: any of these opens what `docs/server.md` lists; none, and everything is open.
        served_model_name: names of the model for clients, the first one in answers; by default `model` as it was given.
        chat_template: the template itself, once it is read.
        shutdown_timeout: seconds that requests in progress have after SIGTERM.
        receive_timeout: seconds from a client's first byte, or its connection, to the last byte of its request.
        keep_alive_timeout: seconds between an answer and the next request of a connection.

    Raises:
        ConfigError: a value that is impossible, or values that contradict each other.
    """

    host: str = field(default="127.0.0.1", metadata=_flag("address to listen on; 0.0.0.0 for every one"))
    port: int = field(default=8000, metadata=_flag("port to listen on; 0 for a free one", parse=int))
    api_key: Sequence[str] = field(default=(), metadata=_flag("key that clients have to send", metavar="KEY"))
    served_model_name: Sequence[str] = field(
        default=(),
        metadata=_flag("name of the model for clients; default: MODEL as it was given", metavar="NAME"),
    )
    ssl_keyfile: str | None = field(default=None, metadata=_flag("private key, for HTTPS", metavar="PATH"))
    ssl_certfile: str | None = field(default=None, metadata=_flag("certificate, for HTTPS", metavar="PATH"))
    ssl_ca_certs: str | None = field(
        default=None, metadata=_flag("certificates of the authorities whose clients are let in", metavar="PATH")
    )
    ssl_cert_reqs: int = field(
        default=0,
        metadata=_flag("certificates of clients: 0 for none, 1 for those that have one, 2 for all", parse=int),
    )
    allowed_origins: Sequence[str] = field(
        default=(),
        metadata=_flag("origin whose pages may call the server from a browser", metavar="ORIGIN"),
    )
    max_num_queued_reqs: int = field(
        default=4096, metadata=_flag("maximum number of requests that wait; more get 503", parse=int)
    )
    shutdown_timeout: float = field(
        default=30.0, metadata=_flag("seconds that requests have to finish after SIGTERM", parse=float)
    )
    max_body_bytes: int | str | None = field(
        default=None,
        metadata=_flag(
            "size of the largest request body; default: 4MiB, or 32 bytes a token of the context", metavar="SIZE"
        ),
    )
    receive_timeout: float = field(
        default=60.0, metadata=_flag("seconds that a client has to send a whole request", parse=float)
    )
    keep_alive_timeout: int = field(
        default=5, metadata=_flag("seconds that a connection without a request stays open", parse=int)
    )
    chat_template: str | None = field(
        default=None, metadata=_flag("chat template, or path of one, instead of the tokenizer's", metavar="TEMPLATE")
    )
    admin_endpoints: bool = field(
        default=False, metadata=_flag("offer /sleep, /wake_up, /is_sleeping and /reset_prefix_cache")
    )
    dashboard: bool = field(default=True, metadata=_flag("offer /dashboard"))
    log_prompts: bool = field(default=False, metadata=_flag("write prompts to the log"))
    disable_log_requests: bool = field(default=False, metadata=_flag("no line in the log for each request"))
    log_level: str = field(default="info", metadata=_flag("least severe messages of the log", choices=LOG_LEVELS))

    def __post_init__(self) -> None:
        self._set("api_key", _keys(self.api_key))
        for name in ("served_model_name", "allowed_origins"):
            self._set(name, _texts(name, getattr(self, name)))
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host is {shown(self.host)}; give an address, such as 127.0.0.1")
        self._set("port", checked_whole("port", self.port, 0, 65535))
        self._set("max_num_queued_reqs", checked_whole("max_num_queued_reqs", self.max_num_queued_reqs, 0))
        self._set("keep_alive_timeout", checked_whole("keep_alive_timeout", self.keep_alive_timeout, 0))
        for name, least in (("shutdown_timeout", 0.0), ("receive_timeout", 0.1)):
            seconds = number(getattr(self, name))
            if seconds is None or seconds < least:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; give seconds, {least:g} or more")
            self._set(name, seconds)
        if self.max_body_bytes is not None:
            self._set("max_body_bytes", parse_bytes(self.max_body_bytes, "max_body_bytes"))
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {shown(origin)}, which no page has; give origins such as "
                    "https://chat.example.org, or * for all"
                )
        checked_choice("log_level", self.log_level, LOG_LEVELS)
        self._set("chat_template", _template(self.chat_template))
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate that belongs to it")
        self._set("ssl_cert_reqs", checked_whole("ssl_cert_reqs", self.ssl_cert_reqs, 0, 2))
        if bool(self.ssl_cert_reqs) != (self.ssl_ca_certs is not None):
            raise ConfigError(
                f"ssl_cert_reqs is {self.ssl_cert_reqs} and ssl_ca_certs is {shown(self.ssl_ca_certs)}; to ask clients "
                "for certificates, give ssl_ca_certs with ssl_cert_reqs=2, or 1 where they may have none"
            )
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs needs ssl_certfile, the certificate of the server")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"{name} is {shown(path)}, where no file is; give the path of a PEM file")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _template(given: str | None) -> str | None:
    """A template that is given as such, or as the path of a file."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except OSError as error:
        raise ConfigError(f"chat_template is {shown(given)}: {error.strerror}; give a template or its path") from error


def _keys(keys: object) -> tuple[str, ...]:
    """Keys, of which messages show none."""
    given = (keys,) if isinstance(keys, str) else keys
    if not isinstance(given, Sequence) or not all(isinstance(key, str) for key in given):
        raise ConfigError("api_key is no text; give a key, or several")
    for key in given:
        check_key("api_key", key)
    return tuple(given)


def check_key(name: str, key: str) -> None:
    """Raise a ConfigError for a key that no client can send."""
    if not key:
        raise ConfigError(f"{name} is empty, which would be no protection; give a key, or leave {name} out")
    if not re.fullmatch(r"[!-~]+( [!-~]+)*", key):
        raise ConfigError(
            f"{name} has characters that no header can have, or spaces around it; give printable ASCII characters"
        )


def _texts(name: str, values: object) -> tuple[str, ...]:
    texts = (values,) if isinstance(values, str) else values
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{name} is {shown(values)}; give texts, none of them empty")
    return tuple(texts)
