"""The paged backend over windows, under a name of its own, so that tests run over it as over any other backend."""

from __future__ import annotations

from typing import Any

PAGED_WINDOWS = "paged-windows"


def chosen(kv: str, **options: Any) -> dict[str, Any]:
    """The keywords of `LLM` for a backend. Over windows a block has to be whole pages."""
    if kv != PAGED_WINDOWS:
        return {"kv": kv, **options}
    windows = {**(options.get("kv_options") or {}), "windows": True}
    return {"block_size": 32, **options, "kv": "paged", "kv_options": windows}
