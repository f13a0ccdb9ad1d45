"""One file per part of `bench.gpu`. The folder is the list.

A part defines

    ABOUT                       one line
    RANK                        parts run in this order, the most valuable first
    SECONDS                     limit of its processes, not an estimate; the limits decide the groups
    run(quick) -> Report        measures

A side of a comparison that cannot be measured is named, with the reason, in the list parameters[MISSING] of the report;
the run then fails. Files of its own go to the folder that the environment variable OUT names.

Without a GPU a part runs over the stub driver, with `quick`: its tensors are on `device.DEVICE`, the CPU.
"""

MISSING = "missing"
OUT = "VATTN_GPU_OUT"
