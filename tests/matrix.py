"""python -m tests.matrix [ROW ...] [--tests PATH ...]: the tests that concern versions, over other versions.

Makes an environment for each row under build/matrix, by pip, with the Python that runs this; installs vattn with its
extra "dev" there; runs the tests; and prints a table of the rows. An environment whose tests passed is removed. Ends
with 1 if the tests of a row fail or its environment cannot be made.

Rows:
    oldest  what pyproject.toml requires of vattn and its extra "cuda", at its lower bounds
    gpu     torch and transformers of the machines on which the results on GPUs are measured
    newest  the newest that pip finds
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build" / "matrix"
GPU = ["torch==2.11.0", "transformers==5.17.0"]

# What calls torch or transformers where they change: torch's OpenMP runtime; their caches, attention and models;
# graphs; the whole engine with a model of every family; and cuda-python and DLPack over the stub driver.
TESTS = [
    "tests/vattn/test_cpu.py",
    "tests/vattn/test_imports.py",
    "tests/vattn/attention",
    "tests/vattn/hf",
    "tests/engine/model",
    "tests/engine/test_families.py::test_tokens_equal_generate_alone",
    "tests/stub_cuda",
]
SHOWN = ("torch", "transformers", "numpy", "cuda-python")  # in the table
_LINES_OF_A_FAILURE = 40


def required() -> list[str]:
    """What pyproject.toml requires of vattn and of its extra "cuda", as it is written there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["cuda"]]


def oldest(requirement: str) -> str:
    """`torch==2.9` for `torch>=2.9`.

    Raises:
        ValueError: the requirement has no lower bound.
    """
    found = re.match(r"([\w.-]+)>=([\d.]+)", requirement)
    if found is None:
        raise ValueError(f"pyproject.toml requires {requirement!r}: write its lower bound first, as in 'torch>=2.9'")
    return "==".join(found.groups())


def pins() -> dict[str, list[str]]:
    """Rows and the versions that they ask for."""
    return {"oldest": [oldest(requirement) for requirement in required()], "gpu": GPU, "newest": []}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if every row passed."""
    rows = pins()
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", nargs="*", choices=(*rows, []), metavar="ROW", help=", ".join(rows))
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="what pytest runs in each")
    args = parser.parse_args(argv)
    table = [("", "python", *SHOWN, "minutes", "result")]
    failed = False
    for name in args.rows or rows:
        print(f"{name}: {' '.join(rows[name]) or 'the newest'}", flush=True)
        start = time.monotonic()
        environment = ENVIRONMENTS / name
        versions = ["-"] * len(SHOWN)
        passed, result = make(environment, rows[name])
        if passed:
            versions = installed(environment)
            passed, result = test(environment, args.tests)
        if passed:
            shutil.rmtree(environment)
        failed |= not passed
        minutes = f"{(time.monotonic() - start) / 60:.1f}"
        table.append((name, ".".join(map(str, sys.version_info[:3])), *versions, minutes, result))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 1 if failed else 0


def make(environment: Path, versions: Sequence[str]) -> tuple[bool, str]:
    """Makes an environment with vattn, its tools and these versions; returns whether it is there, and pip's error."""
    python = environment / "bin" / "python"
    constraints = environment / "constraints.txt"
    shutil.rmtree(environment, ignore_errors=True)
    done = run([sys.executable, "-m", "venv", str(environment)])
    if done.returncode == 0:
        constraints.write_text("\n".join(versions))
        # A build folder of its own: another environment of this Python loads its module from the one in pyproject.toml.
        folder = f"build-dir={environment / 'native'}"
        install = [str(python), "-m", "pip", "install", "--quiet", "--editable", ".[dev]", "-C", folder]
        done = run([*install, "--constraint", str(constraints)])
    return done.returncode == 0, f"no environment: {_last_line(done.stderr)}"


def installed(environment: Path) -> list[str]:
    """The versions of SHOWN there."""
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep='\\n')"
    return run([str(environment / "bin" / "python"), "-c", script, *SHOWN], check=True).stdout.splitlines()


def test(environment: Path, paths: Sequence[str]) -> tuple[bool, str]:
    """Runs the tests with its packages; returns whether all passed, and pytest's last line."""
    options = ["-q", "-rfEs", "-p", "no:cacheprovider", "-n", "auto", "--dist", "worksteal"]
    done = run([str(environment / "bin" / "python"), "-m", "pytest", *options, *paths])
    log = environment / "pytest.log"
    log.write_text(done.stdout + done.stderr)
    told = [line for line in done.stdout.splitlines() if line.startswith(("SKIPPED", "FAILED", "ERROR"))]
    print("\n".join(told if done.returncode == 0 else [*told[-_LINES_OF_A_FAILURE:], f"see {log}"]), flush=True)
    return done.returncode == 0, _last_line(done.stdout)


def run(command: Sequence[str], *, check: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=check)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


if __name__ == "__main__":
    raise SystemExit(main())
