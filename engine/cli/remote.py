"""A model behind an OpenAI-compatible server, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from vattn.errors import ConfigError, VattnError

from ..loadgen.sse import EventReader, error_message

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
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a server; give one such as http://localhost:8000")
    return url.rstrip("/") if parts.path.strip("/") else url.rstrip("/") + "/v1"


class RemoteModel:
    """One model of a server.

    Args:
        url: of the server, with or without `/v1`.
        model: its name there; None for the first that the server lists.
        api_key: None for that in the environment's `OPENAI_API_KEY`.
        sampling: fields of each request.

    Raises:
        ConfigError: no server answers there, or it lists no model.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: Mapping[str, Any]) -> None:
        self._root = api_root(url)
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._sampling = dict(sampling)
        self.name = model or self._first_model()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Generator[str]:
        """The answer to a conversation, piece by piece."""
        sampling = dict(self._sampling)
        sampling["max_completion_tokens"] = sampling.pop("max_tokens")
        for choice in self._stream("/chat/completions", {"messages": list(messages), **sampling}):
            yield choice.get("delta", {}).get("content") or ""

    def complete(self, prompt: str) -> Generator[str]:
        """The continuation of a prompt, piece by piece."""
        for choice in self._stream("/completions", {"prompt": prompt, **self._sampling}):
            yield choice.get("text") or ""

    def _first_model(self) -> str:
        with self._open("/models") as answer:
            listed = json.load(answer).get("data") or []
        if not listed:
            raise ConfigError(f"{self._root} lists no model; give one with --model-name")
        return str(listed[0]["id"])

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The first choice of each event, until the server says that it is done."""
        try:
            with self._open(path, {"model": self.name, "stream": True, **body}) as answer:
                events = EventReader()
                while data := answer.read1(65536):
                    for event in events.feed(data):
                        if event == "[DONE]":
                            return
                        chunk = json.loads(event)
                        if "error" in chunk:
                            raise AnswerFailed(error_message(event))
                        yield from chunk.get("choices", [])[:1]
        except (ConfigError, http.client.HTTPException, OSError, ValueError) as error:
            raise AnswerFailed(str(error)) from error
        raise AnswerFailed("the server ended its answer early")

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        request = urllib.request.Request(
            self._root + path, None if body is None else json.dumps(body).encode(), self._headers
        )
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with error:
                message = error_message(error.read(65536).decode(errors="replace"))
            remedy = _REMEDIES.get(error.code)
            raise ConfigError(
                f"{self._root}{path} answers {error.code}: {message}" + (f"; {remedy}" if remedy else "")
            ) from error
        except urllib.error.URLError as error:
            raise ConfigError(
                f"no server answers at {self._root} ({error.reason}); start one with `vattn serve`, or correct --url"
            ) from error
        return answer
