"""One file per part of `bench.gpu`. The folder is the list.

A part defines

    ABOUT                       one line
    RANK                        parts run in this order, the most valuable first
    SECONDS                     limit of its processes, not an estimate; the limits decide the groups
    COMPUTES                    whether it needs a GPU; if False, it also runs over the stub driver
    run(quick) -> Report        measures

Files of its own go to the folder that the environment variable OUT names.
"""

OUT = "VATTN_GPU_OUT"
