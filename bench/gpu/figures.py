"""What a part hands on: its table, kept row by row, and the names by which the command and a part find each other."""

from __future__ import annotations

import json
import os

from bench.harness.report import Row

MISSING = "missing"
OUT = "VATTN_GPU_OUT"
ROWS = "VATTN_GPU_ROWS"  # the file that keeps the rows of the running part, one JSON value per line


class Figures(list[Row]):
    """The rows of a part's table; each is on disk when `append` returns."""

    def append(self, row: Row) -> None:
        super().append(row)
        if file := os.environ.get(ROWS):
            with open(file, "a") as rows:
                rows.write(json.dumps(row) + "\n")
