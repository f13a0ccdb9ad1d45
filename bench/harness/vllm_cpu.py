"""What a process of vLLM's CPU build needs."""

from __future__ import annotations

from pathlib import Path


def environment(python: str) -> dict[str, str]:
    """Variables for a process of this interpreter.

    vLLM starts modules in processes of their own. Unless told otherwise, these look for packages in the current folder,
    where a checkout of vattn has no native module, and compute on all cores but one, so on half of two.
    """
    library = Path(python).parent.parent / "lib" / "libiomp5.so"  # as vLLM's documentation advises
    preload = {"LD_PRELOAD": str(library)} if library.exists() else {}
    cores = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONSAFEPATH": "1", **cores, **preload}
