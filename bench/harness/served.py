"""Traces through the engine with each backend: a small model, and a memory that cannot hold all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from bench.harness.report import Row
from bench.harness.trace import Arrival, Played, play
from vattn.engine import LLM

BACKENDS = ("virtual", "paged", "static", "dynamic")
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
# What a quick run changes in it.
SMALL = {"vocab_size": 256, "num_hidden_layers": 1}


def serve(model: PreTrainedModel, kv: str, arrivals: Sequence[Arrival], *, longest: int, budget: str) -> Played:
    """Plays a trace through an engine of its own.

    Args:
        longest: most tokens of a request.
        budget: bytes of the cache, as text.
    """
    with LLM(
        model,
        kv=kv,
        skip_tokenizer_init=True,
        max_num_seqs=32,
        max_model_len=longest,
        memory_budget=budget,
        enable_prefix_caching=False,
        num_threads=torch.get_num_threads(),
    ) as llm:
        play(llm, [Arrival(0.0, [1] * 64, 4)])  # warms up
        return play(llm, arrivals)


def as_row(played: Played, objectives: Mapping[str, float] | None = None) -> Row:
    """Throughput, medians and 99th percentiles, and how the memory was used.

    Args:
        objectives: milliseconds by metric; goodput counts the requests that meet all of them.
    """
    summary = played.summary(objectives)
    times = {
        f"{name} {metric.upper()} ms": summary[f"{name}_{metric}_ms"]
        for metric in ("ttft", "tpot")
        for name in ("median", "p99")
    }
    return {
        "output tokens/s": summary["output_throughput"],
        **times,
        "median latency ms": summary["median_e2el_ms"],
        "p99 latency ms": summary["p99_e2el_ms"],
        **({} if objectives is None else {"goodput, requests/s": summary["request_goodput"]}),
        "most running": float(_most_running(played)),
        "preempted": float(sum(output.metrics.num_preemptions for output in played.outputs)),
    }


def _most_running(played: Played) -> int:
    """The most requests that had started and not ended; a preempted one counts until it ends."""
    # Records of the steps would tell, but the figures in them take time, and more of it with some backends.
    times = [output.metrics for output in played.outputs]
    starts = [(each.first_scheduled_time, 1) for each in times]
    ends = [(each.finished_time, -1) for each in times]
    return max(accumulate(change for _, change in sorted(starts + ends)))
