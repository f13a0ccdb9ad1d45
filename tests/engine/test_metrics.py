"""Counts of an engine, compared with what its outputs say."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from tests.support.tiny_models import make_model, make_prompts
from vattn.engine import LLM, Counter, EngineClosed, Gauge, Histogram, RequestOutput, SamplingParams, Vector
from vattn.engine.beam_search import BeamSearchParams
from vattn.engine.metrics import Buckets
from vattn.engine.scheduling.record import StepRecord


def values(llm: LLM) -> dict[str, float]:
    """Counters, gauges, and how many values each histogram has."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = ":".join([metric.name, *metric.labels.values()])
        match metric:
            case Counter() | Gauge():
                found[name] = metric.value
            case Histogram():
                found[name] = metric.count
            case _:
                assert isinstance(metric, Vector)
    return found


def histogram(llm: LLM, name: str) -> Histogram:
    (found,) = [metric for metric in llm.get_metrics() if metric.name == name]
    assert isinstance(found, Histogram)
    return found


def test_counts_are_those_of_the_outputs() -> None:
    prompts = make_prompts([20, 33, 7])
    options = {"max_model_len": 128, "memory_budget": "256KiB", "kv_options": {"page_size": 4096}}
    with LLM(make_model("llama"), preemption_mode="recompute", **options) as llm:  # type: ignore[arg-type]
        assert set(values(llm).values()) <= {0.0, 1.0, float(llm.core.kv.stats().reserved_bytes)}
        params = [SamplingParams(n=2, seed=1, max_tokens=5), *[SamplingParams(temperature=0, max_tokens=60)] * 2]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.add_request("x", prompts[0])
        llm.add_request("y", prompts[1])
        llm.step()
        now = values(llm)
        assert now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] == 2
        assert 0 < now["vllm:kv_cache_usage_perc"] <= 1
        sizes = [now[f"vattn:memory_bytes:{kind}"] for kind in ("live", "used", "physical")]
        assert 0 < sizes[0] <= sizes[1] <= sizes[2]
        running = sum(bool(request.output_token_ids) for request in llm.core.scheduler.running)
        llm.abort("x")
        llm.abort("y")
        now = values(llm)
        assert (
            now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == now["vattn:memory_bytes:live"] == 0
        )
        generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        assert now["vllm:generation_tokens"] == generated + running
        assert now["vllm:prompt_tokens"] == sum(map(len, prompts)) + sum(map(len, prompts[:running]))
        assert now["vllm:request_success:length"] == 4
        assert now["vllm:request_success:abort"] == 2
        assert now["vllm:request_success:stop"] == now["vllm:request_success:error"] == 0
        assert now["vllm:num_preemptions"] == sum(output.metrics.num_preemptions for output in outputs)
        assert now["vllm:prefix_cache_queries"] == llm.core.scheduler.query_tokens > 0
    with pytest.raises(EngineClosed):
        llm.get_metrics()


def test_histograms_are_those_of_the_outputs() -> None:
    prompts = make_prompts([20, 33, 7])
    with LLM(make_model("llama"), max_model_len=128, memory_budget="4MiB") as llm:
        params = SamplingParams(n=2, seed=1, max_tokens=5)
        outputs = llm.generate(prompts, [params, *[SamplingParams(temperature=0, max_tokens=12)] * 2], use_tqdm=False)
        llm.generate(prompts[0], SamplingParams(max_tokens=0), use_tqdm=False)
        generated = histogram(llm, "vllm:request_generation_tokens")
        assert (generated.count, generated.sum) == (5, 5 + 5 + 12 + 12)
        assert [generated.buckets[bound] for bound in ("2.0", "5.0", "10.0", "20.0", "+Inf")] == [1, 3, 3, 5, 5]
        assert histogram(llm, "vllm:request_prompt_tokens").sum == 20 + 20 + 33 + 7 + 20
        assert values(llm)["vllm:prompt_tokens"] == 20 + 33 + 7 + 20
        assert histogram(llm, "vllm:time_to_first_token_seconds").count == 4
        assert histogram(llm, "vllm:inter_token_latency_seconds").count == 34 - 4
        times = [output.metrics for output in outputs[1:]]
        longest = max(time.finished_time - time.arrival_time for time in times if time.finished_time is not None)
        latency = histogram(llm, "vllm:e2e_request_latency_seconds")
        assert latency.count == latency.buckets["+Inf"] == 5
        assert longest <= latency.sum
        steps = histogram(llm, "vattn:step_seconds")
        assert 12 <= steps.count <= 20
        assert steps.sum > 0


def test_the_latency_of_a_token_has_the_time_that_its_request_was_preempted() -> None:
    with LLM(make_model("llama"), max_model_len=128, memory_budget="4MiB") as llm:
        llm.add_request("a", make_prompts([20])[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        for _ in range(4):
            llm.step()
        llm.core.scheduler.preempt_last()
        time.sleep(0.3)
        while llm.has_unfinished():
            llm.step()
        latency = histogram(llm, "vllm:inter_token_latency_seconds")
        assert latency.count == 7
        assert latency.sum > 0.3


def test_accepted_drafts_are_counted_by_place() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(make_model("llama"), max_model_len=128, memory_budget="4MiB", speculative_config=config) as llm:
        llm.generate([[5, 6, 7] * 8], SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        found = {metric.name: metric for metric in llm.get_metrics()}
        places = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
        assert isinstance(places, Vector)
        assert len(places.values) == 3
        assert sorted(places.values, reverse=True) == list(places.values)
        accepted = found["vllm:spec_decode_num_accepted_tokens"]
        assert isinstance(accepted, Counter)
        assert sum(places.values) == accepted.value > 0


def test_a_sleep_counts_as_preemptions() -> None:
    with LLM(make_model("llama"), max_model_len=128, memory_budget="4MiB") as llm:
        for name in "ab":
            llm.add_request(name, [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
        llm.step()
        llm.sleep()
        llm.wake_up()
        outputs = list(finished(llm))
        assert values(llm)["vllm:num_preemptions"] == sum(output.metrics.num_preemptions for output in outputs) == 2
        assert values(llm)["vllm:prompt_tokens"] == 6


def test_a_beam_search_counts_its_tokens_and_times() -> None:
    """Beams are requests that begin in the middle of the search, and have the times of its first one."""
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with LLM(make_model("llama"), max_model_len=128, memory_budget="4MiB") as llm:
        llm.beam_search([[5, 6, 7]], params)
        counts = values(llm)
        assert counts["vllm:prompt_tokens"] == 3
        assert counts["vllm:generation_tokens"] == 1 + 5 * 3
        assert histogram(llm, "vllm:request_queue_time_seconds").sum >= 0
        first = histogram(llm, "vllm:time_to_first_token_seconds")
        last = histogram(llm, "vllm:e2e_request_latency_seconds")
        assert first.count == last.count == 3
        assert 0 < first.sum < last.sum


def test_what_an_interrupt_drops_is_counted() -> None:
    steps = itertools.count()

    def interrupt(_: StepRecord) -> None:
        if next(steps) == 3:
            raise KeyboardInterrupt

    with LLM(make_model("llama"), max_model_len=128, memory_budget="4MiB", on_step=interrupt) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7]] * 2, SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
        counts = values(llm)
        assert counts["vllm:request_success:error"] == counts["vllm:request_prompt_tokens"] == 2


def finished(llm: LLM) -> Iterator[RequestOutput]:
    while llm.has_unfinished():
        yield from (output for output in llm.step() if output.finished)


def test_buckets() -> None:
    buckets = Buckets((1, 2))
    for value, count in ((0.5, 1), (1, 2), (1.5, 1), (9, 3)):
        buckets.add(value, count)
    assert buckets.histogram("x") == Histogram("x", {}, 7, 31.0, {"1.0": 3, "2.0": 4, "+Inf": 7})
