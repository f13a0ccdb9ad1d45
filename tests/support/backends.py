"""The paged backend over windows, under a name of its own, so that tests run over it as over any other backend."""

from __future__ import annotations

from typing import Any

from tests.support.effort import effort
from vattn.engine.kv.make import BACKENDS

PAGED_WINDOWS = "paged-windows"
KVS = (*BACKENDS, PAGED_WINDOWS)
MAIN_KVS = effort(("virtual", "paged"), KVS)  # for what hardly depends on the backend and takes long
GROWING_KVS = tuple(kv for kv in KVS if kv != "static")  # in which a request that has a slot can still lack memory
CACHING_KVS = tuple(kv for kv in KVS if kv not in ("static", "dynamic"))  # that keep prefixes for later requests
MAIN_GROWING_KVS = tuple(kv for kv in MAIN_KVS if kv in GROWING_KVS)


def chosen(kv: str, **options: Any) -> dict[str, Any]:
    """The keywords of `LLM` for a backend. Over windows a block has to be whole pages."""
    if kv != PAGED_WINDOWS:
        return {"kv": kv, **options}
    windows = {**(options.get("kv_options") or {}), "windows": True}
    return {"block_size": 32, **options, "kv": "paged", "kv_options": windows}
