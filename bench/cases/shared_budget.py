"""Two engines of vLLM on one machine whose bursts alternate: half of the memory for each, or one budget for both.

`VATTN_VLLM_PYTHON` as for `plugin`. Both engines are up all the time. With a static split each has half of the blocks;
with one budget each has blocks for all of it, and a broker lends the memory of those that are in use.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bench.cases.plugin import ENGINES, environment, interpreter
from bench.harness import theme
from bench.harness.models import QWEN2, qwen2
from bench.harness.pools import NAME, serving_pool
from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row

ABOUT = "two engines of vLLM in one budget, beside a static split"
QUESTION = "What does one budget for two engines bring?"

_BLOCK = 128  # tokens, vLLM's default on a CPU
_NULL = 1  # block, which every engine of vLLM has beside those that it uses
_SPLIT, _SHARED = "static split, vLLM", "one budget, with the plugin"


def run(quick: bool) -> Report:
    python = interpreter()
    prompt, output, requests, bursts = (16, 4, 2, 1) if quick else (128, 127, 12, 2)
    at_a_time = 4  # requests for which the whole budget has blocks
    # One more, as an idle engine keeps a little of the pool ahead of need.
    blocks = at_a_time * -(-(prompt + output) // _BLOCK) + 1
    burst = {"prompt": prompt, "output": output, "requests": requests}
    config = {**QWEN2, "num_hidden_layers": 1} if quick else QWEN2
    token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    token_bytes *= config["hidden_size"] // config["num_attention_heads"]
    budget = blocks * _BLOCK * token_bytes
    figures: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        qwen2(**config).save_pretrained(place)
        llm = {"model": place, "dtype": "bfloat16", "max_model_len": 2 * _BLOCK, "skip_tokenizer_init": True}
        sides: dict[str, dict[str, Any]] = {
            _SPLIT: {"num_gpu_blocks_override": blocks // 2 + _NULL},
            _SHARED: {
                "num_gpu_blocks_override": blocks + _NULL,
                "worker_cls": "vattn_vllm.CPUWorker",
                "additional_config": {"vattn": {"kv_pool": NAME}},
            },
        }
        for side, more in sides.items():
            with serving_pool(budget):
                seconds = _alternate(python, {**burst, "llm": {**llm, **more}}, bursts)
            rate = len(seconds) * requests / sum(seconds)
            figures.append({"memory": side, "requests/s": rate, "seconds of a burst": sum(seconds) / len(seconds)})
    static, shared = (float(row["requests/s"]) for row in figures)
    return Report(
        parameters={"model": config, **burst, "bursts of each": bursts, "blocks in all": blocks, "block": _BLOCK},
        figures=figures,
        goals=[Goal("requests per second, one budget over a static split", shared / static, ">=", 1.5)],
    )


def _alternate(python: str, order: dict[str, Any], bursts: int) -> Sequence[float]:
    """Seconds of each burst; the engines take turns."""
    with ExitStack() as stack:
        engines = []
        for seed in (1, 2):
            engine = subprocess.Popen(
                [python, str(ENGINES / "bursts.py")],
                env=environment(python, VLLM_ENABLE_V1_MULTIPROCESSING="1"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(engine.wait)
            stack.callback(engine.communicate)
            engines.append(engine)
            _say(engine, json.dumps({**order, "seed": seed}))
            _hear(engine, "READY")
        seconds = []
        for turn in range(bursts + 1):  # the first of each is not counted
            for engine in engines:
                _say(engine, "burst")
                time = float(_hear(engine, "BURST "))
                seconds += [time] if turn else []
        return seconds


def _say(engine: subprocess.Popen[str], line: str) -> None:
    assert engine.stdin is not None
    engine.stdin.write(line + "\n")
    engine.stdin.flush()


def _hear(engine: subprocess.Popen[str], word: str) -> str:
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    raise RuntimeError(f"an engine ended with status {engine.wait()}")


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "Two engines in one budget serve {} times as many requests per second as with half of it each",
            record,
            rows(record, "requests/s", {"memory": _SHARED}, {"memory": _SPLIT}),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    names = ("half of the memory for each", "one budget for both")
    theme.bars(axes, dict(zip(names, (row["requests/s"] for row in rows), strict=True)), names[1:])
    ratio = rows[1]["requests/s"] / rows[0]["requests/s"]
    axes.set_title(f"Two engines that share one budget serve {ratio:.1f} times as many requests per second")
    axes.set(xlabel="requests per second")
