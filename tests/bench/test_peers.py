"""The engines of others that `bench throughput` runs, where an environment variable names their Python."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import peers
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.workload import make_requests
from vattn import cpu
from vattn.engine import LLM

LLAMACPP = os.environ.get("VATTN_LLAMACPP_PYTHON")

# Prints the tokens of each round, of which the protocol has only the number.
OUTPUTS = """
import json, sys
from pathlib import Path
from llamacpp import Engine
model, options, rounds = json.loads(sys.argv[1])
engine = Engine(Path(model), options)
print(json.dumps([engine.generate(requests) for requests in rounds]))
"""


@pytest.mark.skipif(LLAMACPP is None, reason="VATTN_LLAMACPP_PYTHON names no Python with llama-cpp-python")
@pytest.mark.parametrize(
    "cache",
    [{"kv_unified": True, "type_k": "BF16", "type_v": "BF16"}, {"kv_unified": False}],
    ids=["one row", "a row per sequence"],
)
def test_llamacpp_answers_as_transformers_does(cache: dict[str, Any], tmp_path: Path) -> None:
    # Weights so large that logits differ by more than bfloat16's rounding.
    sizes = QWEN2 | TINY | {"num_hidden_layers": 2, "initializer_range": 0.2}
    qwen2(**sizes).save_pretrained(tmp_path)
    requests = make_requests(5, (3, 60), sizes["vocab_size"])
    # Requests wait for slots, and prompts are computed in parts beside decoding.
    options = {"n_ctx": 512, "n_seq_max": 2, "n_batch": 32, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
    found = _outputs(tmp_path, options | cache, [requests, requests[::-1]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for outputs, played in zip(found, (requests, requests[::-1]), strict=True):
        for tokens, request in zip(outputs, played, strict=True):
            assert len(tokens) == request["max_tokens"]
            assert _behind(model, request["prompt_token_ids"], tokens) < 0.1


def _outputs(model: Path, options: dict[str, Any], rounds: list[peers.Workload]) -> list[list[list[int]]]:
    command = [str(LLAMACPP), "-c", OUTPUTS, json.dumps([str(model), options, rounds])]
    environment = {**os.environ, "PYTHONPATH": str(Path(peers.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[list[int]]] = json.loads(done.stdout)
    return found


def _behind(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """By how many standard deviations of the logits the tokens are behind the likeliest ones, at most."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(((logits.max(1).values - chosen) / logits.std(1)).max())


@pytest.mark.skipif(not cpu.has_linear(), reason="torch multiplies on this CPU")
def test_the_floor_has_the_products_of_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply-adds by weights, of every token of a prompt but for those that the last layer leaves out."""
    monkeypatch.syspath_prepend(str(Path(peers.__file__).parent))
    from bench.peers import floor  # a script: it imports its neighbours by their names

    sizes = QWEN2 | TINY | {"num_hidden_layers": 3}
    qwen2(**sizes).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=64)
    with llm:
        calls = floor._note(llm, [{"prompt_token_ids": [*range(1, 41)], "max_tokens": 1}])
    products = 0
    for call in calls:
        for given in (*call.args, *getattr(call.args[0], "__dict__", {}).values()):
            if isinstance(given, cpu.Weight):
                rows = next(part for part in call.args if isinstance(part, torch.Tensor))
                products += rows.shape[0] * given.out * given.width * (2 if given.gated else 1)
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    head = width // sizes["num_attention_heads"]
    qkv, rest = width * (width + 2 * head * sizes["num_key_value_heads"]), width * width + 3 * width * inner
    assert products == 40 * (3 * qkv + 2 * rest) + rest + width * sizes["vocab_size"]
