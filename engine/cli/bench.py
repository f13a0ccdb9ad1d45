"""`vattn bench`: a running server, or the engine in this process, under load."""

from __future__ import annotations

from . import bench_latency, bench_serve, bench_throughput
from .flags import Commands


def add_to(commands: Commands, help: str) -> None:
    """Add `bench` and what it can measure."""
    parser = commands.add_parser("bench", help=help)
    measures = parser.add_subparsers(required=True, metavar="WHAT")
    for what in (bench_serve, bench_latency, bench_throughput):
        what.add_to(measures)
