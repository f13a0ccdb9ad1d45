"""Small models with random weights, and engines in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
from environment import environment

HERE = Path(__file__).parent
Answer = dict[str, Any]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of a kind."""
    return cache(lambda kind: models.make(kind, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def model(model_of: Callable[[str], Path]) -> Path:
    """Four layers, eight query heads and two KV heads of 32."""
    return model_of("full")


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

    def ask(
        *, plugin: Answer | None = None, multiprocessing: bool = False, loaded: str = "vattn", **order: Any
    ) -> Answer:
        llm = {**options, **order.pop("llm", {})}
        if plugin is not None:
            llm |= {"worker_cls": "vattn_vllm.CPUWorker", "additional_config": {"vattn": plugin}}
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)), "VLLM_PLUGINS": loaded}
        done = _run(json.dumps({"llm": llm, **order}, sort_keys=True), tuple(variables.items()))
        found = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        if not found:
            raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
        answer: Answer = json.loads(found[0].removeprefix("ANSWER "))
        return answer

    return ask
