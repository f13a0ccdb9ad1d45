"""Runs scripts in processes of their own, without the seconds in which each would import torch and transformers.

A server that has imported them forks for each script. The fork runs it as `python -W error -c` does, and ends as an
interpreter ends. vattn is not imported before the script does it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import stub_cuda
from tests.support.paths import ROOT

SECONDS = 600  # that a script may take


def run(
    script: str, *arguments: str, cwd: Path | None = None, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What the script printed, and its exit status: negative is the signal that ended it.

    `variables` are added to the environment in which the first script of this process was run.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"script": script, "argv": ["-c", *arguments], "cwd": str(cwd or Path.cwd())}
        files = {"out": str(out), "err": str(err)}
        server.stdin.write(json.dumps({**request, **files, "variables": variables or {}}) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the server of scripts has ended"
        return subprocess.CompletedProcess(script, int(answer), out.read_text(), err.read_text())


def over_stub(script: str, **options: int) -> subprocess.CompletedProcess[str]:
    """Runs a script over a fresh stub driver with these `STUB_CUDA_*` variables, from a process over the stub."""
    assert stub_cuda.ACTIVE in os.environ, "libcuda.so.1 is not the stub"
    return run(script, variables=stub_cuda.variables(options))


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
    """In the server: forks for every request. In a fork: what to run."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            request: dict[str, Any] = json.loads(line)
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(request: dict[str, Any]) -> dict[str, Any]:
    """Streams, folder, arguments and warnings as the script's own interpreter would have them; its namespace."""
    import signal
    import warnings

    signal.alarm(SECONDS)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.close(nothing)
    os.chdir(request["cwd"])
    os.environ.update(request["variables"])
    sys.argv = request["argv"]
    if not sys.flags.safe_path:
        sys.path[0] = ""
    warnings.simplefilter("error")
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    return vars(main)


if __name__ == "__main__":
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    gc.freeze()  # a collection in a fork would copy all the pages that it looks at
    if request := _next_script():
        exec(compile(request["script"], "<string>", "exec"), _become(request))
