"""The peer's side of the protocol of `bench.peers`; imports nothing that a peer's environment may lack."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(load: Callable[[str, dict[str, Any]], tuple[str, str, Callable[[list[dict[str, Any]]], int]]]) -> None:
    """Serves rounds until stdin ends.

    Args:
        load: takes the model's directory and the options; returns name, version, and what runs a round and returns the
            number of output tokens.
    """
    # Libraries print to stdout, where the answers go.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, version, run = load(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps({"name": name, "version": version}), file=answers)
    for line in sys.stdin:
        requests = json.loads(line)
        start = time.perf_counter()
        tokens = run(requests)
        print(json.dumps({"seconds": time.perf_counter() - start, "output_tokens": tokens}), file=answers)
