"""A few worlds of `fuzz.py`, always the same ones; `python tests/fuzz.py --minutes 10 --seed 1` plays others."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import HERE


def test_worlds_with_the_plugin_are_those_without_it() -> None:
    command = [sys.executable, str(HERE / "fuzz.py"), "--worlds", "6", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    counts = {name: int(count) for count, name in re.findall(r"^ *(\d+) (.*)$", done.stdout, re.MULTILINE)}
    assert all(counts[name] for name in ("preemptions", "abort", "one-token prompts", "cached tokens", "blocks hidden"))
