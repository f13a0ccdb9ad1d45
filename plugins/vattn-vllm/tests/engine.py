"""Runs an engine of vLLM in this process, as a JSON on stdin says, and prints its outputs as JSON."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

PROMPTS = 16


def prompts(seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to 500 tokens, of which a third begin with the same 300."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(5, 1000) for _ in range(count)]

    shared = tokens(300)
    return [(shared if not i % 3 else []) + tokens(rng.choice([3, 17, 64, 200])) for i in range(PROMPTS)]


def of_lengths(lengths: list[int]) -> list[list[int]]:
    """Prompts of these lengths, which have nothing in common."""
    rng = random.Random(1)
    return [[rng.randrange(5, 1000) for _ in range(length)] for length in lengths]


def without_mappings(every: int, read: list[int]) -> None:
    """Has all calls that show rows fail for lack of mappings, but for each `every`-th; notes layers read by tables."""
    import itertools

    from vattn_vllm import steps
    from vattn_vllm.memory import KVMemory

    from vattn import BlockWindows, MappingLimit

    calls, real = itertools.count(), BlockWindows.show

    def show(windows: Any, rows: Any, *arguments: Any, **keywords: Any) -> Any:
        if len(rows) and next(calls) % every:
            raise MappingLimit("no mappings", missing_pages=1, missing_bytes=4096)
        return real(windows, rows, *arguments, **keywords)

    by_table = KVMemory.blocks

    def blocks(memory: KVMemory, name: str, table: Any) -> Any:
        read.append(len(table))
        return by_table(memory, name, table)

    KVMemory.blocks = blocks  # type: ignore[method-assign]
    steps._AGAIN = steps._LATEST = 0.0
    BlockWindows.show = show  # type: ignore[method-assign]


def run(order: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    read: list[int] = []
    if every := order.get("without_mappings"):
        without_mappings(every, read)
    llm = LLM(**order["llm"])
    sampling = {
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "detokenize": False,
        **order.get("sampling", {}),
    }
    keywords: dict[str, Any] = {}
    if lora := order.get("lora"):
        from vllm.lora.request import LoRARequest

        keywords["lora_request"] = LoRARequest("adapter", 1, lora)
    results = []
    asked = of_lengths(order["lengths"]) if "lengths" in order else prompts()
    for given in (asked, asked[:5]):
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=each) for each in given],
            SamplingParams(**sampling),
            use_tqdm=False,
            **keywords,
        )
        results.append(
            {
                "tokens": [[list(choice.token_ids) for choice in output.outputs] for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        )
    answer: dict[str, Any] = {"results": results, "read_by_table": len(read)}
    if "worker_cls" in order["llm"]:
        llm.collective_rpc("vattn_check")
        answer["stats"] = llm.collective_rpc("vattn_stats")
    if order.get("then_stock"):
        stock = {name: value for name, value in order["llm"].items() if name not in ("worker_cls", "additional_config")}
        answer["stock"] = run({**order, "llm": stock, "then_stock": False})["results"]
    return answer


def main() -> None:
    order = json.load(sys.stdin)
    print("ANSWER " + json.dumps(run(order)), flush=True)
    if order.get("killed"):
        import psutil

        for process in (*psutil.Process().children(recursive=True), psutil.Process()):
            process.kill()


if __name__ == "__main__":
    main()
