"""Small models with random weights, and engines in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
Answer = dict[str, Any]


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "vattn",
        "OMP_NUM_THREADS": "1",
        **more,
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, eight query heads and two KV heads of 32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    network = Qwen2ForCausalLM(config)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("model")
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def options(model: Path) -> Answer:
    """What every engine is made with."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "seed": 0,
        "skip_tokenizer_init": True,
    }


@cache
def _run(order: str, variables: tuple[tuple[str, str], ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "engine.py")]
    return subprocess.run(
        command, input=order, env=environment(**dict(variables)), capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="session")
def run(options: Answer) -> Callable[..., Answer]:
    """What an engine answers; one that is asked the same again is not run again."""

    def ask(*, plugin: Answer | None = None, multiprocessing: bool = False, **order: Any) -> Answer:
        llm = {**options, **order.pop("llm", {})}
        if plugin is not None:
            llm |= {"worker_cls": "vattn_vllm.CPUWorker", "additional_config": {"vattn": plugin}}
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))}
        done = _run(json.dumps({"llm": llm, **order}, sort_keys=True), tuple(variables.items()))
        found = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        if not found:
            raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
        answer: Answer = json.loads(found[0].removeprefix("ANSWER "))
        return answer

    return ask
