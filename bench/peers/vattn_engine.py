"""vattn's engine. Options: those of `vattn.LLM`."""

from collections.abc import Callable
from importlib import metadata
from typing import Any

from protocol import serve  # type: ignore[import-not-found]

from vattn.engine import LLM, SamplingParams


def generate(llm: LLM, requests: list[dict[str, Any]]) -> int:
    """Runs a round; returns the number of output tokens."""
    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True) for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def load(model: str, options: dict[str, Any]) -> tuple[str, str, Callable[[list[dict[str, Any]]], int]]:
    llm = LLM(model, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    return options.get("kv", "virtual"), metadata.version("vattn"), lambda requests: generate(llm, requests)


if __name__ == "__main__":
    serve(load)
