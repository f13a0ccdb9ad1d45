"""vLLM's CPU build, in process, prefix caching off. Runs under an interpreter that has it. Options: of `vllm.LLM`."""

import os
from collections.abc import Callable
from typing import Any

from protocol import serve  # type: ignore[import-not-found]


def load(model: str, options: dict[str, Any]) -> tuple[str, str, Callable[[list[dict[str, Any]]], int]]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(model, skip_tokenizer_init=True, enable_prefix_caching=False, **options)

    def run(requests: list[dict[str, Any]]) -> int:
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
            for request in requests
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return "vllm", vllm.__version__, run


if __name__ == "__main__":
    serve(load)
