"""Engines whose memory a broker lends."""

from __future__ import annotations

import random
from contextlib import ExitStack

from tests.support import brokers
from tests.support.servers import MODEL
from vattn.engine import LLM, SamplingParams
from vattn.engine.metrics import Gauge
from vattn.engine.scheduling.record import StepRecord
from vattn.engine.server.state import look

BUDGET = 8 * 2**20


def usage(llm: LLM) -> float:
    """The share of the cache that running requests hold, as `get_metrics` and a server's `/metrics` have it."""
    (found,) = [each for each in llm.get_metrics() if each.name == "vllm:kv_cache_usage_perc"]
    assert isinstance(found, Gauge)
    assert look(llm.core)["memory"]["usage"] == found.value
    return found.value


def test_requests_run_together_in_memory_that_an_idle_engine_can_do_without() -> None:
    """Whose cached prefixes fill the pool: the first requests of the other one are not computed one after another."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    steps: list[StepRecord] = []
    with brokers.running(BUDGET), ExitStack() as stack:
        idle, busy = (
            stack.enter_context(
                LLM(MODEL, kv_pool=brokers.NAME, kv_options={"page_size": 4096}, max_num_seqs=8, max_model_len=1024)
            )
            for _ in range(2)
        )
        count = BUDGET // (idle.core.kv.token_bytes * 600)
        assert count >= 4
        prompts = [[rng.randrange(500) for _ in range(400)] for _ in range(2 * count)]
        assert usage(idle) == 0
        idle.add_request("x", prompts[0], params)
        idle.step()
        assert 0 < usage(idle) < 2 / count
        idle.abort("x")
        idle.generate(prompts, params, use_tqdm=False)
        assert usage(idle) == 0
        loan = idle.core.kv.loan
        assert loan is not None
        assert loan.usage.cached > BUDGET / 2
        busy.on_step = steps.append
        busy.generate(prompts[: count - 1], params, use_tqdm=False)
    assert max(step.num_running for step in steps) == count - 1
