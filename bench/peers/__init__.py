"""Engines that `bench throughput` compares, each in a process of its own that is driven over pipes.

A peer is a script, run as `PYTHON SCRIPT MODEL_DIRECTORY OPTIONS` with the options as JSON. When ready, it prints one
line, `{"name", "version"}`. Each line on its stdin is then one round, a JSON list of requests, `{"prompt_token_ids":
[...], "max_tokens": n}`, which it answers with one line, `{"seconds": s, "output_tokens": n}`. All requests of a round
arrive at once, are greedy, and run to `max_tokens`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

Workload = list[dict[str, Any]]


class Peer:
    """A running peer.

    Args:
        python: interpreter.
        script: a script of this folder, by its name without `.py`.
        model: directory of the model.
        options: the script's own.
        environment: variables on top of ours.

    Raises:
        RuntimeError: the process ended before it was ready; its stderr is that of this process.
    """

    def __init__(
        self, python: str, script: str, model: Path, options: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        file = Path(__file__).with_name(f"{script}.py")
        # Python looks in a script's folder, where `protocol` is, unless PYTHONSAFEPATH is set.
        path = os.pathsep.join(filter(None, (str(file.parent), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [python, str(file), str(model), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        ready = self._answer()
        self.name: str = ready["name"]
        self.version: str = ready["version"]

    def run(self, requests: Workload) -> tuple[float, int]:
        """Seconds and output tokens of one round."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["output_tokens"]

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self._process.args!r} ended with status {self._process.wait()}; see its messages above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
