"""An engine of vLLM that serves a burst of requests for each line on stdin, and prints the seconds it took.

The first line is a JSON: the engine's options, and the requests of a burst.
"""

from __future__ import annotations

import json
import random
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    order = json.loads(sys.stdin.readline())
    llm = LLM(**order["llm"])
    params = SamplingParams(temperature=0, max_tokens=order["output"], ignore_eos=True, detokenize=False)
    rng = random.Random(order["seed"])
    print("READY", flush=True)
    for _ in sys.stdin:
        prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(5, 1000) for _ in range(order["prompt"])])
            for _ in range(order["requests"])
        ]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(f"BURST {time.perf_counter() - begin}", flush=True)


if __name__ == "__main__":
    main()
