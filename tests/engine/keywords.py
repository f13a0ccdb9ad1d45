"""What type checkers see of the keywords of `LLM`; `make types` checks it, and an error that is not found is one."""

from __future__ import annotations

from vattn.engine import LLM


def uses() -> None:
    LLM("m", kv="paged", max_num_seqs=3)
    LLM()
    LLM("m", kw="paged")  # type: ignore[call-arg]
    LLM("m", max_num_seqs="3")  # type: ignore[arg-type]
    LLM("m", "paged")  # type: ignore[call-arg]
