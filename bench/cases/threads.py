"""Decoding by number of computing threads, on an idle machine, beside other programs, and when they have gone again.

Own result: `LLM(num_threads="auto")` is as fast as the best number on an idle machine, and beside a busy process it
computes with the cores that are left, instead of waiting in every product for a thread that has none. Each engine has a
process of its own, which keeps eight requests running. On the idle machine they take turns of a second; then each
computes while a busy process starts and ends. `passive` threads sleep while they wait (`OMP_WAIT_POLICY`).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
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
    warm, turn, rounds, busy, after = (0.5, 0.2, 2, 0.5, 0.5) if quick else (3.0, 1.0, 9, 12.0, 12.0)
    figures: list[Row] = []
    series: dict[str, list[float]] = {}
    for model in models:
        with ExitStack() as stack:
            engines = {kind: stack.enter_context(_engine(model, *kind)) for kind in kinds}
            for engine in engines.values():
                engine.rate(warm)
            order, idle = list(engines), {kind: list[float]() for kind in kinds}
            for _ in range(rounds):
                order.append(order.pop(0))
                for kind in order:
                    idle[kind].append(engines[kind].rate(turn))
            for (count, policy), engine in engines.items():
                with _busy_processes():
                    beside = engine.run(busy)
                afterwards = engine.run(after)
                figures.append(
                    {
                        "model": model,
                        "threads": count,
                        "waiting": policy or "default",
                        "idle tokens/s": median(idle[count, policy]),
                        "beside tokens/s": _rate(beside, busy),
                        "after tokens/s": _rate(afterwards, after),
                    }
                )
                name = f"{model}, {count}{' ' * bool(policy)}{policy}"
                series[f"{name}, idle"] = idle[count, policy]
                series[name] = [
                    _rate(seen, end, end - 0.5)
                    for seen, seconds in ((beside, busy), (afterwards, after))
                    for end in (0.5 * (i + 1) for i in range(int(2 * seconds)))
                ]

    def find(model: str, count: str) -> Row:
        return next(r for r in figures if (r["model"], r["threads"], r["waiting"]) == (model, count, "default"))

    goals = []
    for model in models:
        auto = find(model, "auto")
        given = [find(model, count) for count, policy in kinds if count != "auto" and not policy]
        best, best_after = (max(float(row[f"{when} tokens/s"]) for row in given) for when in ("idle", "after"))
        goals += [
            Goal(f"{model}: auto over the best number, idle", float(auto["idle tokens/s"]) / best, ">=", _IDLE_RATIO),
            Goal(f"{model}: auto beside {_BUSY} over idle", float(auto["beside tokens/s"]) / best, ">=", _BUSY_RATIO),
            # Not over the idle rate: a machine's own speed changes by a quarter within these minutes.
            Goal(f"{model}: auto over the best number, after", float(auto["after tokens/s"]) / best_after, ">=", 0.9),
        ]
    return Report(
        parameters={
            "models": "demo/model, float32; Qwen2 of 148 M parameters with random weights, bfloat16",
            "requests": _REQUESTS,
            "prompt and output tokens": f"{_PROMPT} and {_OUTPUT}",
            "cores": cores,
            "busy processes": _BUSY,
            "idle": f"{rounds} turns of {turn:g} s",
            "seconds beside, after": f"{busy:g}, {after:g}",
        },
        figures=figures,
        goals=goals,
        series=series,
    )


# Tokens so far, and seconds since a run began.
Seen = list[tuple[float, int]]


class _Engine:
    """An engine in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        if self._read() != "ready":
            raise RuntimeError("the engine's process did not start")

    def run(self, seconds: float) -> Seen:
        """Has it compute; returns what it had computed when."""
        assert self._process.stdin is not None
        print(json.dumps(seconds), file=self._process.stdin, flush=True)
        return [(moment, tokens) for moment, tokens in self._read()]

    def rate(self, seconds: float) -> float:
        """Has it compute; returns tokens per second."""
        return _rate(self.run(seconds), seconds)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


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
            yield _Engine(process)
            assert process.stdin is not None
            process.stdin.close()
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


def _rate(seen: Seen, end: float, start: float = 0.0) -> float:
    """Tokens per second between two moments; a step that lies across one counts in proportion."""

    def at(moment: float) -> float:
        for (t0, n0), (t1, n1) in itertools.pairwise(seen):
            if t0 <= moment <= t1:
                return n0 + (n1 - n0) * (moment - t0) / (t1 - t0)
        return seen[-1][1]

    return (at(end) - at(start)) / (end - start)


def _compute(name: str, count: str) -> None:
    """Keeps requests running for the seconds of each line of standard input, and prints what it computed when."""
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
        for line in sys.stdin:
            start, end, tokens = time.monotonic(), json.loads(line), 0
            seen: Seen = [(0.0, 0)]
            while seen[-1][0] < end:
                while llm.core.num_groups < _REQUESTS:
                    ids = rng.integers(3, llm.core.loaded.vocab_size, _PROMPT).tolist()
                    llm.add_request(llm.core.new_id(), {"prompt_token_ids": ids}, params)
                before = llm.core.figures.generation_tokens
                llm.step()
                tokens += llm.core.figures.generation_tokens - before
                seen.append((time.monotonic() - start, tokens))
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
        if name.startswith(record["figures"][0]["model"]) and not name.endswith(", idle"):
            axes.plot([(i + 1) / 2 for i in range(len(rates))], rates, label=name.partition(", ")[2])
    axes.set_title("The engine's own choice of threads, while another process comes and goes")
    axes.set(
        xlabel="seconds; another process computes until the middle", ylabel="tokens/s, demo's model", ylim=(0, None)
    )


if __name__ == "__main__":
    _compute(*sys.argv[1:])
