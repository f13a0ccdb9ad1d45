"""Messages to a broker that are nearly messages, or nothing like one."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from vattn.broker.wire import KINDS, STAGES, VERSION

_VALUES: list[Any] = [
    0, 1, VERSION, 4096, 2**18, 2**40, 2**50, 2**62, -1, 2**63, 2**70, 1.5, None, True, False, "", "bad", "cpu",
    "x" * 4096, "x" * 5000, "\ud800", [], {}, {"a": [1]}, *STAGES,
]  # fmt: skip
_VALID = {
    (kind, name): [value for value in _VALUES if holds(value)]
    for kind, fields in KINDS.items()
    for name, holds in fields.items()
}


def message(rng: random.Random) -> bytes:
    """One, with its length in front. Most fields hold what they may, so that many a lie is among them."""
    kind = rng.choice([*KINDS])
    wrong = rng.choice([0.0, 0.0, 0.1, 1.0])
    fields: dict[Any, Any] = {"kind": kind} | {
        name: rng.choice(_VALUES if rng.random() < wrong else _VALID[kind, name]) for name in KINDS[kind]
    }
    if rng.random() < 0.1 and len(fields) > 1:
        fields.pop(rng.choice([name for name in fields if name != "kind"]))
    if rng.random() < 0.1:
        fields[rng.choice(["kind", "extra", "ack"])] = rng.choice(_VALUES)
    body = bytearray(json.dumps(fields).encode())
    for _ in range(rng.choice([0, 0, 0, 0, 1, 3])):
        body[rng.randrange(len(body))] = rng.randrange(256)
    if rng.random() < 0.1:
        body = bytearray(rng.randbytes(rng.randrange(1, 64)))
    length = len(body) if rng.random() < 0.9 else rng.choice([0, 1, len(body) - 1, len(body) + 9, 2**31, 2**32 - 1])
    return struct.pack(">I", length) + bytes(body)
