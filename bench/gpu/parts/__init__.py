"""One file per part of `bench.gpu`. The folder is the list.

A part defines

    ABOUT                       one line
    RANK                        parts run in this order, the most valuable first
    SECONDS                     limit of its processes, not an estimate; the limits decide the groups
    run(quick) -> Report        measures

A part's table is a `Figures`, which keeps each row as soon as it is measured: a limit, an error or the end of the
machine in mid-part then costs only what was still to come. A side of a comparison that cannot be measured is named,
with the reason, in the list parameters[MISSING] of the report; the run then fails. Files of its own go to the folder
that the environment variable OUT names.

Without a GPU a part runs over the stub driver, with `quick`: its tensors are on `device.DEVICE`, the CPU.
"""

from __future__ import annotations

import sys

from bench.harness.discovery import Case, find


def find_parts() -> dict[str, Case]:
    """The parts by name, the most valuable first.

    Raises:
        ValueError: a part lacks one of its constants.
    """
    found = find(sys.modules[__name__])
    for part in found.values():
        if missing := {"RANK", "SECONDS"} - part.constants.keys():
            raise ValueError(
                f"{part.module} has no {', '.join(sorted(missing))}; bench/gpu/parts says what a part needs"
            )
    return dict(sorted(found.items(), key=lambda item: item[1].constants["RANK"]))
