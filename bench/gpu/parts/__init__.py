"""One file per part of `bench.gpu`. The folder is the list.

A part defines

    ABOUT                       one line
    RANK                        parts run in this order, the most valuable first, in case time runs out
    SECONDS                     limit of its process, not an estimate
    COMPUTES                    whether it needs a GPU; if False, it also runs over the stub driver
    run(quick) -> Report        measures
"""
