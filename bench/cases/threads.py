"""Decoding by number of computing threads, on an idle machine, beside other programs, and when they have gone again.

Own result: `LLM(num_threads="auto")` is as fast as the best number on an idle machine, and beside a busy process it
computes with the cores that are left, instead of waiting in every product for a thread that has none. Each engine has a
process of its own, which keeps eight requests running; the busy processes start and end while it does. `passive`
threads sleep while they wait (`OMP_WAIT_POLICY`).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.harness.ratios import Comparison, rows
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row

ABOUT = "decoding by number of threads: idle, beside busy processes, and after them"
QUESTION = "Does the engine choose its threads well?"

_MODELS = ("demo", "148 M")
_BUSY = 1  # processes that do nothing but compute
_REQUESTS, _PROMPT, _OUTPUT = 8, 64, 192
_IDLE_RATIO, _BUSY_RATIO = 0.97, 0.45


def run(quick: bool) -> Report:
    models = _MODELS[:1] if quick else _MODELS
    cores = len(os.sched_getaffinity(0))
    kinds: list[tuple[str, str]] = [("1", ""), (str(cores), ""), (str(cores), "passive"), ("auto", "")]
    if quick:
        kinds = kinds[::3]
    warm, idle, busy, after = (0.5, 0.5, 0.5, 0.5) if quick else (3.0, 8.0, 12.0, 12.0)
    figures: list[Row] = []
    series: dict[str, list[float]] = {}
    for model in models:
        for count, policy in kinds:
            with _engine(model, count, policy) as engine:
                started = engine.start()
                time.sleep(warm)
                moments = [time.monotonic()]
                time.sleep(idle)
                moments.append(time.monotonic())
                with _busy_processes():
                    time.sleep(busy)
                    moments.append(time.monotonic())
                time.sleep(after)
                moments.append(time.monotonic())
            name = f"{model}, {count}{' ' * bool(policy)}{policy}"
            seen = engine.tokens
            rates = [_rate(seen, *pair) for pair in itertools.pairwise(moments)]
            figures.append(
                {
                    "model": model,
                    "threads": count,
                    "waiting": policy or "default",
                    "idle tokens/s": rates[0],
                    "beside tokens/s": rates[1],
                    "after tokens/s": rates[2],
                }
            )
            ends = [started + (i + 1) / 2 for i in range(int(2 * (moments[-1] - started)))]
            series[name] = [_rate(seen, end - 0.5, end) for end in ends]

    def find(model: str, count: str) -> Row:
        return next(r for r in figures if (r["model"], r["threads"], r["waiting"]) == (model, count, "default"))

    goals = []
    for model in models:
        auto = find(model, "auto")
        given = [find(model, count) for count, policy in kinds if count != "auto" and not policy]
        best = max(float(row["idle tokens/s"]) for row in given)
        goals += [
            Goal(f"{model}: auto over the best number, idle", float(auto["idle tokens/s"]) / best, ">=", _IDLE_RATIO),
            Goal(f"{model}: auto beside {_BUSY} over idle", float(auto["beside tokens/s"]) / best, ">=", _BUSY_RATIO),
            Goal(f"{model}: auto after over idle", float(auto["after tokens/s"]) / best, ">=", 0.9),
        ]
    return Report(
        parameters={
            "models": "demo/model, float32; Qwen2 of 148 M parameters with random weights, bfloat16",
            "requests": _REQUESTS,
            "prompt and output tokens": f"{_PROMPT} and {_OUTPUT}",
            "cores": cores,
            "busy processes": _BUSY,
            "seconds idle, beside, after": f"{idle:g}, {busy:g}, {after:g}",
        },
        figures=figures,
        goals=goals,
        series=series,
    )


class _Engine:
    """An engine in a process of its own.

    Attributes:
        tokens: pairs of `time.monotonic()` and the tokens so far; after its end.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.tokens: list[tuple[float, int]] = []

    def start(self) -> float:
        """Waits until it is ready; returns the time."""
        assert self.process.stdout is not None
        if json.loads(self.process.stdout.readline()) != "ready":
            raise RuntimeError("the engine's process did not start")
        return time.monotonic()

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.tokens = [(moment, tokens) for moment, tokens in json.loads(self.process.stdout.read())]
        self.process.wait()


@contextmanager
def _engine(model: str, count: str, policy: str) -> Iterator[_Engine]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    if policy:
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-m", "bench.cases.threads", model, count]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            engine = _Engine(process)
            yield engine
            engine.end()
        except BaseException:
            process.kill()
            raise


@contextmanager
def _busy_processes() -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_BUSY)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _rate(seen: list[tuple[float, int]], start: float, end: float) -> float:
    """Tokens per second between two moments; a step that lies across one counts in proportion."""

    def at(moment: float) -> float:
        for (t0, n0), (t1, n1) in itertools.pairwise(seen):
            if t0 <= moment <= t1:
                return n0 + (n1 - n0) * (moment - t0) / (t1 - t0)
        return seen[0][1] if moment < seen[0][0] else seen[-1][1]

    return (at(end) - at(start)) / (end - start)


def _compute(name: str, count: str) -> None:
    """Keeps requests running until standard input ends; then prints how many tokens there were at which moments."""
    import select

    import numpy as np

    from bench.demo_queue import MODEL
    from bench.harness.models import QWEN2, qwen2
    from vattn.engine.llm import LLM
    from vattn.engine.requests.sampling import SamplingParams

    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"dtype": "float32"} if name == "demo" else {"skip_tokenizer_init": True}
    with LLM(
        str(MODEL) if name == "demo" else qwen2(**QWEN2),
        num_threads="auto" if count == "auto" else int(count),
        max_num_seqs=_REQUESTS,
        max_model_len=512,
        enable_prefix_caching=False,
        **options,
    ) as llm:
        print(json.dumps("ready"), flush=True)
        tokens, seen = 0, [(time.monotonic(), 0)]
        while not select.select([sys.stdin], [], [], 0)[0]:
            while llm.core.num_groups < _REQUESTS:
                ids = rng.integers(3, llm.core.loaded.vocab_size, _PROMPT).tolist()
                llm.add_request(llm.core.new_id(), {"prompt_token_ids": ids}, params)
            before = llm.core.figures.generation_tokens
            llm.step()
            tokens += llm.core.figures.generation_tokens - before
            if time.monotonic() - seen[-1][0] >= 0.02:
                seen.append((time.monotonic(), tokens))
        seen.append((time.monotonic(), tokens))
    print(json.dumps(seen), flush=True)


def compare(record: Record) -> list[Comparison]:
    fixed = [row["threads"] for row in record["figures"] if row["threads"] not in ("1", "auto")]
    sides = [{"threads": threads, "waiting": "default"} for threads in ("auto", fixed[0])]
    return [
        Comparison(
            'Beside a busy process, `num_threads="auto"` makes {} times the tokens of one thread per core',
            record,
            rows(record, "beside tokens/s", sides[0], sides[1], same=["model"]),
        ),
        Comparison(
            "On an idle machine it makes {} times the tokens of one thread per core",
            record,
            rows(record, "idle tokens/s", sides[0], sides[1], same=["model"]),
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    for name, rates in record["series"].items():
        if name.startswith(record["figures"][0]["model"]):
            axes.plot([(i + 1) / 2 for i in range(len(rates))], rates, label=name.partition(", ")[2])
    axes.set_title("The engine's own choice of threads, while another process comes and goes")
    axes.set(xlabel="seconds; another process computes in between", ylabel="tokens/s, demo's model", ylim=(0, None))


if __name__ == "__main__":
    _compute(*sys.argv[1:])
