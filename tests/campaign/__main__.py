"""python -m tests.campaign --minutes 10 --seed 1"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from tests.campaign.campaign import MODES, Finding, Summary, run


def main() -> int:
    """Runs a campaign, until it is interrupted or terminated at the latest; the exit status says whether anything was
    found.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long; 10 where --calls is not given either")
    parser.add_argument("--calls", type=int, help="how many calls on the public interface")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", action="append", choices=MODES, help="only this one; may be given several times")
    parser.add_argument("--scenario", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--findings", type=int, default=1, help="go on until so many kinds are found")
    parser.add_argument("--shrink-seconds", type=float, default=60, help="time to shorten each in; 0: not at all")
    parser.add_argument("--scripts", type=Path, help="a folder to write the scripts of findings to as well")
    options = parser.parse_args()
    if options.minutes is None and options.calls is None:
        options.minutes = 10.0

    def report(found: Finding) -> None:
        print(f"FOUND {found}", flush=True)
        if options.scripts:
            options.scripts.mkdir(parents=True, exist_ok=True)
            path = options.scripts / f"{found.mode}_{found.seed}_{found.scenario}.py"
            path.write_text(found.script)
            print(f"script: {path}\n", flush=True)
        else:
            print(f"{found.script}\n", flush=True)

    summary = Summary()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        run(
            options.seed,
            seconds=None if options.minutes is None else options.minutes * 60,
            calls=options.calls,
            modes=options.mode or tuple(MODES),
            most_findings=options.findings,
            shrink_seconds=options.shrink_seconds,
            first=options.scenario,
            report=report,
            summary=summary,
        )
    print(summary)
    return 1 if summary.findings else 0


if __name__ == "__main__":
    sys.exit(main())
