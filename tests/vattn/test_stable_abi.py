"""The native modules keep to Python's stable ABI, for which they are built from Python 3.12 on, whichever runs here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.paths import ROOT

HEADERS = Path(sysconfig.get_path("include"))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler (g++)")
@pytest.mark.skipif(not (HEADERS / "Python.h").exists(), reason="Python's headers are not installed")
def test_functions_of_python_are_in_its_stable_abi(tmp_path: Path) -> None:
    files = [ROOT / "csrc" / "module.cpp", ROOT / "csrc" / "kernels" / "module.cpp"]
    code = "\n".join(re.sub("//.*", "", file.read_text()) for file in files)
    names = sorted(set(re.findall(r"\bPy[A-Z][A-Za-z]*_[A-Za-z_]+(?=\()", code)))
    assert names
    script = tmp_path / "names.cpp"
    lines = [f"auto* const a{i} = &{name};" for i, name in enumerate(names)]
    script.write_text("\n".join(["#include <Python.h>", *lines]))
    command = ["g++", "-fsyntax-only", "-DPy_LIMITED_API=0x030B0000", f"-I{HEADERS}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
