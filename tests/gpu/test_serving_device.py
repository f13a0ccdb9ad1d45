"""What serves models, on a GPU: engines by the path of a model, a server, a pool that a broker lends."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from tests.support import brokers, servers
from tests.support.servers import MODEL
from tests.support.waiting import SECONDS
from vattn.engine import LLM, SamplingParams

DEVICE = "cuda"
NEEDED = "fastapi", "httptools", "prometheus_client", "pydantic", "uvicorn"  # by a server
PROMPTS = ["The memory of a request", "Pages", "A kernel reads contiguous rows. " * 40]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def texts(**options: Any) -> list[str]:
    with LLM(MODEL, dtype="float32", max_num_seqs=4, **{"memory_budget": "256MiB", **options}) as llm:
        assert llm.core.loaded.model.device.type == ("cpu" if options.get("device") == "cpu" else DEVICE)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.check()
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return texts(device="cpu")


def test_a_path_is_loaded_to_the_device(expected: list[str]) -> None:
    assert texts() == expected


@pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}")
def test_a_server(expected: list[str]) -> None:
    with servers.running({"dtype": "float32", "memory_budget": "256MiB"}) as server:
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        for prompt, text in zip(PROMPTS, expected, strict=True):
            answer = httpx.post(f"{server.url}/v1/completions", json={**asked, "prompt": prompt}, timeout=SECONDS)
            assert answer.json()["choices"][0]["text"] == text
        assert server.terminate() == 0


def test_two_engines_in_a_pool_that_a_broker_lends(expected: list[str]) -> None:
    """One after another, and beside an idle one."""
    with brokers.running(64 * 2**20, f"{DEVICE}:0") as broker:
        for _ in range(2):
            assert texts(kv_pool=brokers.NAME, memory_budget=None) == expected
        with LLM(MODEL, dtype="float32", max_num_seqs=4, kv_pool=brokers.NAME) as idle:
            idle.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert texts(kv_pool=brokers.NAME, memory_budget=None) == expected
            assert broker.problems() == []
