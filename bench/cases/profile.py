"""Where the time of a step goes: 32 requests through the engine, seconds by part, for decode and for mixed steps.

The parts are timed from outside, by wrapping the calls into them; a part's time excludes that of the parts it calls.
The wrapper costs about a microsecond per call, which is charged to the caller. Matrix products are with the norms, the
rotation and the activation that are computed in the same call. A call that computes several layers says itself where
its time went.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch

from bench.harness import theme
from bench.harness.models import QWEN2, TINY, qwen2
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.workload import make_requests
from vattn import cpu
from vattn.engine import LLM, SamplingParams
from vattn.engine.model.linears import Packed
from vattn.engine.scheduling.record import StepRecord

ABOUT = "where the time of an engine's step goes"
QUESTION = "Where does a step's time go?"

_BATCH = 32
_BOOKKEEPING = ("scheduler", "step()", "sampler")
_PARTS = ("matrix products", "attention", "KV writes", "KV reads", "rest of the model", "outputs", "engine loop")


class _Clock:
    """Seconds per part, excluding the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def wrapped(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Charges calls of `owner.name` to `part`."""
        original = getattr(owner, name)
        own = name in vars(owner)

        @functools.wraps(original)
        def timed(*args: Any, **keywords: Any) -> Any:
            self._switch(part)
            try:
                return original(*args, **keywords)
            finally:
                self._switch(None)

        setattr(owner, name, timed)
        try:
            yield
        finally:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Charges the parts of `cpu.run_layers`, which are in the running part."""
        original = cpu.run_layers

        def timed(*args: Any, **keywords: Any) -> Any:
            spent = original(*args, **keywords)
            for part, seconds in {
                "matrix products": spent.projection + spent.residual,
                "KV writes": spent.store,
                "attention": spent.attention,
            }.items():
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds
            self._since += sum(spent)
            return spent

        with mock.patch.object(cpu, "run_layers", timed):
            yield

    def _switch(self, part: str | None) -> None:
        now = time.perf_counter()
        if self._running:
            current = self._running[-1]
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        if part is None:
            self._running.pop()
        else:
            self._running.append(part)
        self._since = now


def run(quick: bool) -> Report:
    sizes = QWEN2 | (TINY if quick else {})
    model = qwen2(**sizes)
    requests = make_requests(3 if quick else _BATCH, (32, 512), sizes["vocab_size"])
    figures: list[Row] = []
    goals: list[Goal] = []
    for kv in ("virtual", "paged"):
        steps = _profile(model, kv, requests, rounds=1 if quick else 3)
        for kind in ("decode", "mixed"):
            of_kind = [seconds for decodes, seconds in steps if decodes == (kind == "decode")]
            total = sum(sum(seconds.values()) for seconds in of_kind)
            row: Row = {"kv": kv, "steps": f"{len(of_kind)} {kind}", "ms per step": 1e3 * total / len(of_kind)}
            for part in (*_PARTS, *_BOOKKEEPING):
                row[f"{part} %"] = 100 * sum(seconds.get(part, 0.0) for seconds in of_kind) / total
            figures.append(row)
        if kv == "virtual":
            full = [seconds for decodes, seconds in steps if decodes]
            share = median(sum(s.get(part, 0.0) for part in _BOOKKEEPING) / sum(s.values()) for s in full)
            goals.append(Goal("scheduler, step() and sampler together, share of a decode step", share, "<=", 0.03))
    return Report(
        parameters={
            "model": sizes,
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            "requests": len(requests),
            "sampling": "greedy",
        },
        figures=figures,
        goals=goals,
    )


def _profile(
    model: Any, kv: str, requests: list[dict[str, Any]], *, rounds: int
) -> list[tuple[bool, dict[str, float]]]:
    """For every step, whether it had decodes only, and the seconds of each part."""
    clock = _Clock()
    steps: list[tuple[bool, dict[str, float]]] = []

    def on_step(record: StepRecord) -> None:
        steps.append((record.prefill_tokens == 0, clock.seconds))
        clock.seconds = {}

    with LLM(
        model,
        kv=kv,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=_BATCH,
        max_model_len=4096,
        memory_budget="1GiB",
    ) as llm:
        parts: list[tuple[Any, str, str]] = [
            (llm.core, "step", "engine loop"),
            (llm.core.scheduler, "schedule", "scheduler"),
            (llm.core.kv, "prepare", "step()"),
            (llm.core.runner, "run", "rest of the model"),
            (type(llm.core.runner.attention), "__call__", "attention"),
            (llm.core.kv, "write", "KV writes"),
            (llm.core.kv, "read", "KV reads"),
            (llm.core, "_collect", "outputs"),
            (llm.core.sampler, "sample", "sampler"),
        ]
        parts += [(Packed, name, "matrix products") for name in ("__call__", "plus")]
        parts += [(kind, "__call__", "matrix products") for kind in (cpu.Projection, cpu.Residual)]
        if not any("forward" in vars(module) for module in model.modules()):  # as transformers wrote it
            linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
            parts += [(module, "forward", "matrix products") for module in linears]
        with ExitStack() as stack:
            stack.enter_context(clock.layers())
            for owner, name, part in parts:
                stack.enter_context(clock.wrapped(owner, name, part))
            prompts = [request["prompt_token_ids"] for request in requests]
            params = [
                SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True) for request in requests
            ]
            for number in range(-1, rounds):
                llm.on_step = on_step if number >= 0 else None
                llm.generate(prompts, params, use_tqdm=False)
                clock.seconds = {}
    return steps


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"][::-1]
    labels = [f"{row['kv']}, {row['steps'].split()[1]}" for row in rows]
    shown = {
        "matrix products": theme.color("virtual"),
        "attention": theme.color("paged"),
        "KV writes": theme.color("another"),
        "KV reads": theme.color("other"),
        "rest of the model": theme.color("dynamic"),
    }
    parts = {name: [row[f"{name} %"] for row in rows] for name in shown}
    parts["engine"] = [
        sum(row[column] for column in row if column.endswith(" %") and column.removesuffix(" %") not in shown)
        for row in rows
    ]
    left = [0.0] * len(rows)
    for name, widths in parts.items():
        axes.barh(labels, widths, left=left, color=shown.get(name, theme.INK), label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    decode = next(row for row in record["figures"] if row["kv"] == "virtual" and row["steps"].endswith("decode"))
    axes.grid(visible=False, axis="y")
    axes.set_title(
        f"Matrix products take {decode['matrix products %']:.0f} % of a decode step, attention "
        f"{decode['attention %']:.0f} %"
    )
    axes.set(xlabel="share of a step, in %")
