"""What `vattn doctor` says of the machine: the first thing to read where anything else fails."""

from __future__ import annotations

from bench.gpu.figures import Figures
from bench.harness.report import Report
from vattn.doctor import doctor

ABOUT = "what vattn doctor says of this machine"
RANK = 1
SECONDS = 20


def run(quick: bool) -> Report:
    figures = Figures()
    for line in doctor().splitlines():
        figures.append({"report": line})
    return Report(parameters={}, figures=figures, goals=[], timed=False)
