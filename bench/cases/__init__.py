"""One file per benchmark. The folder is the list: a file that is here is run, listed, tested and published.

A case defines

    ABOUT                       one line for `python -m bench --list`
    run(quick) -> Report        measures; with `quick`, the smallest run that still goes through all of its code
    QUESTION                    optional: what it answers, as a reader would ask; a heading of the report
    compare(record)             optional: what a record says to that, as sentences around ratios
    draw(axes, record)          optional: draws a committed record onto matplotlib's axes. A plot counts as stale when
                                the source of `draw` changes, so it should need no helpers of the case
"""
