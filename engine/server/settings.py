"""`ServerSettings`: what a server can be asked for, beyond its engine."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError

from vattn.errors import ConfigError
from vattn.integers import shown
from vattn.units import parse_bytes

from ..checks import checked_choice, checked_whole, number
from ..options import option
from ..requests.chat import check_template

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s\[\]\"',]+|[a-z]+://\[[0-9a-f:.]+\](:\d+)?|null")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server listens, what it accepts, and what it says.

    Its fields are the flags of `vattn serve`; those that hold several texts may be repeated there. `chat_template` is
    the template itself, once it is read.

    Raises:
        ConfigError: a value that is impossible, or values that contradict each other.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every one")
    port: int = option(8000, "port to listen on; 0 for a free one", parse=int)
    api_key: Sequence[str] = option(
        (),
        "key that clients have to send, any of several; also from `VATTN_API_KEY`; none, and everything is open",
        metavar="KEY",
    )
    served_model_name: Sequence[str] = option(
        (),
        "name of the model for clients, the first one in answers; by default `MODEL` as it was given, and "
        "`demo_model` for the one that ships",
        metavar="NAME",
    )
    ssl_keyfile: str | None = option(None, "private key, for HTTPS", metavar="PATH")
    ssl_certfile: str | None = option(None, "certificate, for HTTPS", metavar="PATH")
    ssl_ca_certs: str | None = option(
        None, "certificates of the authorities whose clients are let in, for HTTPS", metavar="PATH"
    )
    ssl_cert_reqs: int = option(
        0, "which clients have to show a certificate: 0 for none, 1 for those that have one, 2 for all", parse=int
    )
    allowed_origins: Sequence[str] = option(
        (), "origin whose pages may call the server from a browser", metavar="ORIGIN"
    )
    max_num_queued_reqs: int = option(4096, "maximum number of requests that wait; more get 503", parse=int)
    shutdown_timeout: float = option(30.0, "seconds that requests in progress have after SIGTERM", parse=float)
    max_body_bytes: int | str | None = option(
        None,
        "size of the largest request body; by default `4MiB`, or 32 bytes per token of the context if that is more",
        metavar="SIZE",
    )
    receive_timeout: float = option(
        60.0, "seconds from a client's first byte, or its connection, to the last byte of its request", parse=float
    )
    keep_alive_timeout: int = option(5, "seconds between an answer and the next request of a connection", parse=int)
    chat_template: str | None = option(
        None, "chat template, or path of one, instead of the tokenizer's", metavar="TEMPLATE"
    )
    admin_endpoints: bool = option(False, "offer `/sleep`, `/wake_up`, `/is_sleeping` and `/reset_prefix_cache`")
    dashboard: bool = option(True, "offer `/dashboard`")
    log_prompts: bool = option(False, "write prompts to the log")
    disable_log_requests: bool = option(False, "no line in the log for each request")
    log_level: str = option("info", "least severe messages of the log", choices=LOG_LEVELS)

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
        if self.ssl_certfile is not None:
            _check_certificates(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _template(given: str | None) -> str | None:
    """A template that is given as such, or as the path of a file."""
    if given is None:
        return None
    try:
        template = given if "{" in given else Path(given).read_text(encoding="utf-8")
        check_template(template)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"chat_template is {shown(given)}: {why}; give a Jinja template, or its path") from error
    return template


def _check_certificates(certfile: str, keyfile: str | None, ca_certs: str | None) -> None:
    """Raise a ConfigError for files that uvicorn could not use, which reads them only once the model is loaded."""
    key = f"ssl_certfile is {shown(certfile)}" if keyfile is None else f"ssl_keyfile is {shown(keyfile)}"

    def password() -> str:  # OpenSSL would ask for it on the terminal
        raise ConfigError(
            f"{key}, whose private key is encrypted; decrypt it first (openssl pkey -in KEY -out NEW, or openssl rsa) "
            "and give the new file"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password)
    except OSError as error:
        pair = key if keyfile is None else f"ssl_certfile is {shown(certfile)} and {key}"
        raise ConfigError(
            f"{pair}, which OpenSSL cannot use ({error.strerror}); give the PEM files of a certificate and of the "
            "private key that belongs to it"
        ) from error
    try:
        if ca_certs is not None:
            context.load_verify_locations(ca_certs)
    except OSError as error:
        raise ConfigError(
            f"ssl_ca_certs is {shown(ca_certs)}, which OpenSSL cannot read ({error.strerror}); give a PEM file of "
            "certificates"
        ) from error


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
