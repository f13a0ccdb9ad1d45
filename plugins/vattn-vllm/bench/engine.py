"""Times an engine of vLLM, as a JSON on stdin says: seconds of decoding per case, printed as JSON.

Prompts are computed by a run before, and found in the prefix cache by those that are timed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any


def run(order: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(**order["llm"])
    rng = random.Random(0)
    figures = []
    for context, count in order["cases"]:
        prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(5, 1000) for _ in range(context)]) for _ in range(count)
        ]

        def generate(tokens: int, prompts: list[Any] = prompts) -> float:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begin

        prefill = generate(1)
        generate(4)
        seconds = [generate(order["tokens"]) for _ in range(order["repeats"])]
        figures.append({"context": context, "requests": count, "prefill": prefill, "seconds": seconds})
    return figures


if __name__ == "__main__":
    print("ANSWER " + json.dumps(run(json.load(sys.stdin))))
