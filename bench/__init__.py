"""Benchmarks: each reproduces a published result, or shows one of vattn's own, as ratios within one run.

    python -m bench NAME ... [--quick] [--json FILE]    measure
    python -m bench --all                               measure everything
    python -m bench --list                              what there is
    python -m bench --publish [--check]                 tables and plots in the documents

To add a benchmark, add a file to `bench/cases/`; its docstring says how. A record written by `--json` is committed as
`bench/results/<machine>/<name>.json`. Tables and plots in the documents are made from those files, and from nothing
else.
"""
