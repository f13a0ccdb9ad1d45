"""A model behind an OpenAI-compatible server, with the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from vattn.errors import ConfigError, VattnError
from vattn.integers import shown

from ..loadgen.sse import EventReader, error_message

_KEY_VARIABLE = "OPENAI_API_KEY"
_REMEDIES = {
    401: "give its key with --api-key, or in OPENAI_API_KEY",
    404: "is --url that of an OpenAI-compatible server, and --model-name one of its models?",
}


class AnswerFailed(VattnError):
    """A model gave no answer, or no whole one; it may answer the next question."""


def api_root(url: str) -> str:
    """The address that ends in `/v1`, from one with or without it; another path is left as it is.

    Raises:
        ConfigError: it is no address of a server.
    """
    with contextlib.suppress(ValueError):  # of brackets that are not closed, or a port that is no number
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/") if parts.path.strip("/") else url.rstrip("/") + "/v1"
    raise ConfigError(f"{url!r} is no address of a server; give one such as http://localhost:8000")


def key_to_send(given: str | None) -> str | None:
    """The key that was given, or that of the environment's `OPENAI_API_KEY`; None for no key.

    Raises:
        ConfigError: no header can have it. The message does not show it.
    """
    name, key = ("--api-key", given) if given else (_KEY_VARIABLE, os.environ.get(_KEY_VARIABLE))
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{name} has characters that no header can have, such as a line break; give printable ASCII characters"
        )
    return key or None


class RemoteModel:
    """One model of a server.

    Args:
        url: of the server, with or without `/v1`.
        model: its name there; None for the first that the server lists.
        api_key: None for that in the environment's `OPENAI_API_KEY`.
        sampling: fields of each request.

    Raises:
        ConfigError: no server answers there, or it lists no model, or no header can have the key.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: Mapping[str, Any]) -> None:
        self._root = api_root(url)
        key = key_to_send(api_key)
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._opener = urllib.request.build_opener(_RedirectsWithin)
        self._sampling = dict(sampling)
        self.name = model or self._first_model()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Generator[str]:
        """The answer to a conversation, piece by piece."""
        sampling = dict(self._sampling)
        sampling["max_completion_tokens"] = sampling.pop("max_tokens")
        yield from self._stream(
            "/chat/completions",
            {"messages": list(messages), **sampling},
            lambda choice: (choice.get("delta") or {}).get("content"),
        )

    def complete(self, prompt: str) -> Generator[str]:
        """The continuation of a prompt, piece by piece."""
        yield from self._stream("/completions", {"prompt": prompt, **self._sampling}, lambda choice: choice.get("text"))

    def _first_model(self) -> str:
        try:
            with self._open("/models") as answer:
                names = [each["id"] for each in json.load(answer)["data"]]
            if not all(isinstance(name, str) for name in names):
                raise TypeError("a name is text")
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._root}/models lists no models; is --url that of an OpenAI-compatible server?"
            ) from error
        if not names:
            raise ConfigError(f"{self._root} lists no model; give one with --model-name")
        return str(names[0])

    def _stream(self, path: str, body: Mapping[str, Any], text: Callable[[Any], Any]) -> Generator[str]:
        """The text of the first choice of each event, until the server says that it is done."""
        try:
            with self._open(path, {"model": self.name, "stream": True, **body}) as answer:
                events = EventReader()
                while data := answer.read1(65536):
                    for event in events.feed(data):
                        if event == "[DONE]":
                            return
                        yield _piece(event, text)
        except ConfigError as error:
            raise AnswerFailed(str(error)) from error
        raise AnswerFailed("the server ended its answer early")

    @contextlib.contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Generator[http.client.HTTPResponse]:
        """An answer. Whatever goes wrong with it, until it is read, is a ConfigError."""
        url = self._root + path
        try:
            request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), self._headers)
            try:
                answer: http.client.HTTPResponse = self._opener.open(request)
            except urllib.error.HTTPError as error:
                with error:
                    raise ConfigError(_refusal(url, error)) from error
            with answer:
                yield answer
        except ConfigError:
            raise
        except urllib.error.URLError as error:
            raise ConfigError(
                f"no server answers at {self._root} ({error.reason}); start one with `vattn serve`, or correct --url"
            ) from error
        except (http.client.HTTPException, OSError, RecursionError, ValueError) as error:
            raise ConfigError(
                f"{url} gives no answer that can be read ({type(error).__name__}: {shown(str(error))}); is --url that "
                "of an OpenAI-compatible server?"
            ) from error


class _RedirectsWithin(urllib.request.HTTPRedirectHandler):
    """Follows redirects on one server only: urllib would send the key wherever they lead."""

    def redirect_request(self, req: urllib.request.Request, *args: Any) -> urllib.request.Request | None:
        *_, url = args
        if urllib.parse.urlsplit(url)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:
            return None
        return super().redirect_request(req, *args)


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    """What a server says that answers with an error, or leads elsewhere, and what to do about it."""
    message = f"{url} answers {error.code}: {error_message(error.read(65536).decode(errors='replace'))}"
    place = error.headers.get("Location")
    remedy = _REMEDIES.get(error.code)
    if place:
        remedy = f"it leads to {shown(place)}; if the key may go there, correct --url"
    return f"{message}; {remedy}" if remedy else message


def _piece(event: str, text: Callable[[Any], Any]) -> str:
    """The text of the first choice of a chunk; "" if it has none."""
    chunk = json.loads(event)
    if isinstance(chunk, dict) and "error" in chunk:
        raise AnswerFailed(error_message(event))
    try:
        return "".join(text(choice) or "" for choice in (chunk.get("choices") or [])[:1])
    except (AttributeError, KeyError, TypeError) as error:
        raise AnswerFailed(f"the server sends {shown(chunk)}, which is no chunk of an answer") from error
