"""A server of the small shipped model in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support import scripts
from tests.support.waiting import SECONDS, Background

MODEL = str(Path(__file__).resolve().parents[2] / "demo" / "model")

_SCRIPT = """
import json, sys
from vattn.engine.config import EngineConfig
from vattn.engine.server import ServerSettings, serve
config, settings = map(json.loads, sys.argv[1:3])
sys.exit(serve(EngineConfig(**config), ServerSettings(**settings)))
"""


@dataclass
class Server:
    """A running server.

    Attributes:
        url: without a slash at its end.
        verify: what its clients need for TLS; by default they trust any certificate, and have none.
        log: the lines of its log so far; `plain` are those that are no JSON.
    """

    process: subprocess.Popen[str] | scripts.Process
    verify: ssl.SSLContext | bool = False
    url: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    serving: threading.Event = field(default_factory=threading.Event)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of `/metrics`."""
        return metric(httpx.get(f"{self.url}/metrics", verify=self.verify, timeout=SECONDS).text, name, **labels)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=SECONDS)

    def read_log(self) -> None:
        """Until the process ends; in a thread."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.log.append(json.loads(line))
                if self.log[-1]["message"] == "serving":
                    self.url = self.log[-1]["url"]
                    self.serving.set()
            else:
                self.plain.append(line)
        self.serving.set()


def metric(text: str, name: str, **labels: str) -> float:
    """The value of one sample in Prometheus' format."""
    for line in text.splitlines():
        found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if found and found[1] == name and all(f'{key}="{value}"' in (found[2] or "") for key, value in labels.items()):
            return float(found[3])
    raise KeyError(name)


@contextlib.contextmanager
def running(
    config: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    verify: ssl.SSLContext | bool = False,
    **settings: Any,
) -> Iterator[Server]:
    """A server on a free port, which is killed afterwards if it still runs."""
    config = {"model": MODEL, "memory_budget": "16MiB", "max_num_seqs": 16, **(config or {})}
    settings = {"port": 0, "served_model_name": ["tiny"], **settings}
    process = scripts.start(_SCRIPT, json.dumps(config), json.dumps(settings), variables=environment, seconds=0)
    with _serving(Server(process, verify)) as server:
        yield server


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[Server]:
    """As `running`, of a command that serves."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with _serving(Server(process)) as server:
        yield server


@contextlib.contextmanager
def _serving(server: Server) -> Iterator[Server]:
    process = server.process
    reading = Background(server.read_log)
    try:
        assert server.serving.wait(SECONDS), "the server did not start"
        assert server.url, f"the server ended with {process.wait(SECONDS)}"
        httpx.get(f"{server.url}/health", verify=server.verify, timeout=SECONDS)
        yield server
    finally:
        process.kill()
        process.wait()
        reading.finish()  # a process that the server left may have its standard error open
        assert process.stderr is not None
        process.stderr.close()
