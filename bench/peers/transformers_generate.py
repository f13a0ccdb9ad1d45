"""transformers itself: `generate`, one request after another, or `generate_batch`, its continuous batching.

Options: `batch`, and with it those of `transformers.ContinuousBatchingConfig`. `generate_batch` takes one number of new
tokens for all requests, so they are added one by one to the manager that it uses.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from protocol import serve  # type: ignore[import-not-found]


def load(model: str, options: dict[str, Any]) -> tuple[str, str, Callable[[list[dict[str, Any]]], int]]:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    loaded.train(False)
    batch = options.pop("batch")

    def one_by_one(requests: list[dict[str, Any]]) -> int:
        total = 0
        for request in requests:
            ids = torch.tensor([request["prompt_token_ids"]])
            count = request["max_tokens"]
            output = loaded.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, do_sample=False
            )
            total += output.shape[1] - ids.shape[1]
        return total

    def batched(requests: list[dict[str, Any]]) -> int:
        config = transformers.ContinuousBatchingConfig(**options)
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        total = 0
        with loaded.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, block=True, timeout=5
        ) as manager:
            waiting = set()
            for request in requests:
                waiting.add(
                    manager.add_request(
                        request["prompt_token_ids"], max_new_tokens=request["max_tokens"], eos_token_id=-1
                    )
                )
            while waiting:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    waiting.discard(result.request_id)
                    total += len(result.generated_tokens)
        return total

    return ("generate_batch" if batch else "generate"), transformers.__version__, batched if batch else one_by_one


if __name__ == "__main__":
    serve(load)
