"""Counts of an engine, compared with what its outputs say."""

from __future__ import annotations

import pytest
from tiny_models import make_model, make_prompts

from vattn.engine import LLM, Counter, EngineClosed, Gauge, SamplingParams


def values(llm: LLM) -> dict[str, float]:
    found = {}
    for metric in llm.get_metrics():
        assert isinstance(metric, Counter | Gauge)
        found[":".join([metric.name, *metric.labels.values()])] = metric.value
    return found


def test_counts_are_those_of_the_outputs() -> None:
    prompts = make_prompts([20, 33, 7])
    options = {"max_model_len": 128, "memory_budget": "256KiB", "kv_options": {"page_size": 4096}}
    with LLM(make_model("llama"), preemption_mode="recompute", **options) as llm:  # type: ignore[arg-type]
        assert set(values(llm).values()) <= {0.0, 1.0, float(llm.kv.stats().reserved_bytes)}
        params = [SamplingParams(n=2, seed=1, max_tokens=5), *[SamplingParams(temperature=0, max_tokens=60)] * 2]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.add_request("x", prompts[0])
        llm.add_request("y", prompts[1])
        llm.step()
        now = values(llm)
        assert now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] == 2
        assert 0 < now["vllm:kv_cache_usage_perc"] <= 1
        assert 0 < now["vattn:kv_live_bytes"] <= now["vattn:kv_used_bytes"] <= now["vattn:kv_physical_bytes"]
        running = sum(bool(request.output_token_ids) for request in llm.scheduler.running)
        llm.abort("x")
        llm.abort("y")
        now = values(llm)
        assert now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == now["vattn:kv_live_bytes"] == 0
        generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        assert now["vllm:generation_tokens"] == generated + running
        assert now["vllm:prompt_tokens"] == sum(map(len, prompts)) + sum(map(len, prompts[:running]))
        assert now["vllm:request_success:length"] == 4
        assert now["vllm:request_success:abort"] == 2
        assert now["vllm:request_success:stop"] == now["vllm:request_success:error"] == 0
        assert now["vllm:num_preemptions"] == sum(output.metrics.num_preemptions for output in outputs)
        assert now["vllm:prefix_cache_queries"] == llm.scheduler.query_tokens > 0
    with pytest.raises(EngineClosed):
        llm.get_metrics()
