"""The dashboard's files and events, without a browser; `make dashboard-test` opens it in one."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.support.servers import MODEL, Server, running
from tests.support.waiting import SECONDS
from vattn.engine import LLM
from vattn.engine.server.app import make_app, make_service
from vattn.engine.server.dashboard import MOST_WATCHERS
from vattn.engine.server.settings import ServerSettings

pytestmark = pytest.mark.slow(1)

KEY = {"Authorization": "Bearer sesame"}
NAME = "<img src=x onerror=alert(1)>\n\ndata: {}"
FILES = {
    "/dashboard": "text/html",
    "/dashboard/dashboard.css": "text/css",
    "/dashboard/dashboard.js": "text/javascript",
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with running(api_key=["sesame"], served_model_name=[NAME]) as started:
        yield started
        assert "sesame" not in json.dumps(started.log)


class TooManyWatchers(Exception):
    """The server takes no more."""


@contextlib.contextmanager
def watching(server: Server) -> Iterator[Iterator[dict[str, Any]]]:
    """The events that somebody with a key sees; they come for ever, so a test may look at them for `SECONDS`.

    Raises:
        TooManyWatchers: others see them.
    """
    deadline = time.monotonic() + SECONDS

    def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        for line in lines:
            assert time.monotonic() < deadline, line
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))

    url = f"{server.url}/dashboard/events"
    with httpx.stream("GET", url, headers=KEY, verify=server.verify, timeout=SECONDS) as answer:
        if answer.status_code == 503:
            raise TooManyWatchers
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events(answer.iter_lines())


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.mark.parametrize(("path", "media_type"), FILES.items())
def test_the_files_are_open_and_hold_nothing_of_the_server(guarded: Server, path: str, media_type: str) -> None:
    answer = httpx.get(f"{guarded.url}{path}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in answer.headers
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "onerror" not in answer.text
    assert httpx.head(f"{guarded.url}{path}").status_code == 200


def test_the_page_is_complete_and_keeps_to_its_policy(guarded: Server) -> None:
    files = {path: httpx.get(f"{guarded.url}{path}").text for path in FILES}
    page = Page(files["/dashboard"])
    for tag, attributes in page.tags:
        assert not any(name == "style" or name.startswith("on") for name in attributes), (tag, attributes)
        assert tag != "style"
        assert tag != "script" or attributes["src"]
        address = attributes.get("src") or attributes.get("href") or ""
        assert address.startswith(("#", "data:,")) or not address or f"/{address}" in FILES, address
    for text in files.values():
        assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}
    script = files["/dashboard/dashboard.js"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script)

    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert set(re.findall(r'(?:\$|write)\("([\w-]+)"', script)) <= ids
    for _, attributes in page.tags:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert attributes.get(name) is None or attributes[name] in ids
    assert [tag for tag, _ in page.tags].count("main") == 1
    assert sum("role" in each and each["role"] == "status" for _, each in page.tags) == 1


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Cookie": "key=sesame"}])
@pytest.mark.parametrize("query", ["", "?key=sesame", "?api_key=sesame"])
def test_events_need_the_key_in_its_header(guarded: Server, headers: dict[str, str], query: str) -> None:
    answer = httpx.get(f"{guarded.url}/dashboard/events{query}", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_events_show_what_runs_and_no_prompt(guarded: Server) -> None:
    prompt = "Question: " + " ".join(str(i) for i in range(250)) + " xylophone\nAnswer:"
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True}
    is_seen = threading.Event()

    def post() -> None:
        while not is_seen.is_set():
            httpx.post(f"{guarded.url}/v1/completions", json=body, headers=KEY, timeout=SECONDS)

    def decode_together(state: dict[str, Any]) -> bool:
        slots = [slot for slot in state["slots"] if slot["active"]]
        decoding = [request for request in state["requests"] if request["state"] == "decoding"]
        return state["counts"]["running"] == len(slots) == len(decoding) == 3 and all(slot["shared"] for slot in slots)

    threads = [threading.Thread(target=post) for _ in range(3)]
    with watching(guarded) as events:
        first = next(events)
        assert first["model"] == NAME, "a name with an end of an event in it does not end it"
        for thread in threads:
            thread.start()
        seen = []
        try:
            for state in events:
                seen.append(state)
                if decode_together(state):
                    break
        finally:
            is_seen.set()
        assert {slot["prefix"] for slot in state["slots"] if slot["active"]} == {0}
        for thread in threads:
            thread.join()
        last = next(state for state in events if state["counts"] == {"running": 0, "waiting": 0})
    assert "xylophone" not in json.dumps([seen, last])
    times = [first["time"], *(each["time"] for each in seen)]
    distinct = sorted(set(times))
    assert times == sorted(times)
    assert all(later - earlier >= 0.25 for earlier, later in itertools.pairwise(distinct))


def test_watchers_are_bounded_and_leave_nothing(guarded: Server) -> None:
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            # The server hears late of those that have left.
            watchers: list[Iterator[dict[str, Any]]] = []
            deadline = time.monotonic() + SECONDS
            while len(watchers) < MOST_WATCHERS:
                assert time.monotonic() < deadline, "those that left are still watching"
                with contextlib.suppress(TooManyWatchers):
                    watchers.append(stack.enter_context(watching(guarded)))
            states = [next(events) for events in watchers]
            assert len({state["time"] for state in states}) < MOST_WATCHERS, "they share their looks"
            answer = httpx.get(f"{guarded.url}/dashboard/events", headers=KEY)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "too_many_watchers"


def test_watchers_do_not_keep_a_server_from_stopping() -> None:
    with running(api_key=["sesame"]) as server, watching(server) as events:
        next(events)
        assert server.terminate() == 0  # and not when the watcher leaves, which waits for the last event
        *_, last = events
        assert last["error"]["code"] == "engine_stopped"


def test_it_can_be_left_out() -> None:
    llm = LLM(MODEL, memory_budget="4MiB", max_num_seqs=2)
    with TestClient(make_app(make_service(llm.core, ServerSettings(dashboard=False), "tiny"))) as http:
        for path in (*FILES, "/dashboard/events"):
            assert http.get(path).status_code == 404
