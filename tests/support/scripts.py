"""Runs scripts in processes of their own, without the seconds in which each would import torch and others' packages.

A server that has imported them forks for each script. The fork runs it as `python -c` does, and ends as an interpreter
ends, but for the modules and the destructors of libraries that were loaded before: to clear those takes longer than
most scripts. vattn is not imported before the script does it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from weakref import finalize

import stub_cuda
from tests.support.paths import ROOT

SECONDS = 600  # that a script may take; then it is ended, so that nobody reads from it for ever


def run(
    script: str,
    *arguments: str,
    cwd: Path | None = None,
    variables: dict[str, str] | None = None,
    to_the_end: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What the script printed, and its exit status: negative is the signal that ended it. A warning is an error.

    `variables` are added to the environment. `to_the_end` clears torch's modules, too, and runs its destructors.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        options = {"warnings": "error", "cwd": str(cwd or Path.cwd()), "to_the_end": to_the_end}
        status = Process(script, arguments, str(out), str(err), variables, **options).wait()
        return subprocess.CompletedProcess(script, status, out.read_text(), err.read_text())


def over_stub(script: str, *, to_the_end: bool = False, **options: int) -> subprocess.CompletedProcess[str]:
    """Runs a script over a fresh stub driver with these `STUB_CUDA_*` variables, from a process over the stub."""
    assert stub_cuda.ACTIVE in os.environ, "libcuda.so.1 is not the stub"
    return run(script, variables=stub_cuda.variables(options), to_the_end=to_the_end)


def start(script: str, *arguments: str, variables: dict[str, str] | None = None, seconds: int = SECONDS) -> Process:
    """A script that goes on until it ends by itself, or is killed; its standard error can be read meanwhile.

    After `seconds` it is killed; 0 is never.
    """
    reading, writing = os.pipe()
    try:
        err = f"/proc/{os.getpid()}/fd/{writing}"
        process = Process(script, arguments, os.devnull, err, variables, seconds=seconds)
    finally:
        os.close(writing)
    process.stderr = os.fdopen(reading)
    return process


class Process:
    """A script that runs in a fork of the server: what `subprocess.Popen` has of it."""

    def __init__(
        self,
        script: str,
        arguments: tuple[str, ...],
        out: str,
        err: str,
        variables: dict[str, str] | None,
        **options: Any,
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        request = {"script": script, "argv": ["-c", *arguments], "environment": environment, "cwd": str(Path.cwd())}
        self.pid = _ask({**request, "out": out, "err": err, "seconds": SECONDS, **options})
        self.stderr: TextIO | None = None
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            TimeoutExpired: it still runs after so many seconds.
        """
        if self._status is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a script", timeout or 0)
            finally:
                os.close(ended)
            self._status = _ask({"reap": self.pid})
        return self._status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _ask(request: dict[str, Any]) -> int:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the server of scripts has ended"
    return int(answer)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with its input, which ends with this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.support.scripts"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(server.communicate)
    return server


def _next_script() -> dict[str, Any] | None:
    """In the server: forks for every script. In a fork: what to run."""
    running: set[int] = set()
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if pid := request.get("reap"):
            _, status = os.waitpid(pid, 0)
            running.discard(pid)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        files = [os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]
        child = os.fork()
        if not child:
            signal.alarm(request["seconds"])
            return request | {"files": files}
        for file in files:
            os.close(file)
        running.add(child)
        print(child, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _become(request: dict[str, Any]) -> dict[str, Any]:
    """Streams, environment, folder, arguments and warnings as the script's own interpreter would have them; its
    namespace.
    """
    import warnings

    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *request["files"]]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    if not sys.flags.safe_path:
        sys.path[0] = ""
    if not request.get("to_the_end"):
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # with the exit status; after the destructors of libraries that are loaded later
    if "warnings" in request:
        warnings.simplefilter(request["warnings"])
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    return vars(main)


def _leave_standing(names: list[str]) -> None:
    """Takes these modules from the interpreter, which at its end would copy their pages to clear them."""
    for name in names:
        if module := sys.modules.pop(name, None):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


if __name__ == "__main__":
    preloaded: list[str] = []
    atexit.register(_leave_standing, preloaded)  # the first to be registered is the last to be called

    import torch  # noqa: F401

    if stub_cuda.ACTIVE not in os.environ:  # scripts over the stub have no models
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    gc.freeze()  # a collection in a fork would copy all the pages that it looks at
    if request := _next_script():
        if not request.get("to_the_end"):
            preloaded += sys.modules.keys() - {"sys", "builtins", "__main__"}
            # Finalizers of torch's libraries would take operators from its registry, one by one: a third of a script.
            for each in finalize._registry:  # type: ignore[attr-defined]
                each.atexit = False
        exec(compile(request["script"], "<string>", "exec"), _become(request))
