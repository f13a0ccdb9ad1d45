"""`vattn serve` of the project's environment, for clients in an environment of their own; nothing asks the network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Read when a client is imported, which happens after this.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "no_proxy": "127.0.0.1,localhost,::1",
    "NO_PROXY": "127.0.0.1,localhost,::1",
}

import httpx
import pytest

from tests.support.servers import MODEL, Server, started

VATTN = str(Path(__file__).parents[2] / ".venv" / "bin" / "vattn")
SERVE = [VATTN, "serve", MODEL, "--port", "0", "--served-model-name", "tiny", "--kv-cache-memory-bytes", "32MiB"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with started(SERVE) as serving:
        yield serving
        assert httpx.get(f"{serving.url}/load").json() == {"server_load": 0}
        assert serving.terminate() == 0


@pytest.fixture
def guarded() -> Iterator[Server]:
    """One that wants a key and has no queue."""
    with started([*SERVE, "--api-key", "secret", "--max-num-seqs", "1", "--max-num-queued-reqs", "0"]) as serving:
        yield serving
