"""The main job, to look at: `python -m demo.run`.

A queue of short and long prompts goes through the engine twice, with the KV cache in virtual tensors and in paged
blocks. It prints every request's text, tokens and time, and a table of both runs side by side, and draws the memory
that each held beside what a static reservation would hold, the memory over time, and the page map. Every answer is
compared with transformers' own `generate` for its prompt alone.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo.prompts import prompts as demo_prompts
from vattn import SlotPages
from vattn.engine.kv.virtual import VirtualKV
from vattn.engine.llm import LLM
from vattn.engine.requests.outputs import RequestOutput
from vattn.engine.requests.sampling import SamplingParams
from vattn.engine.scheduling.record import StepRecord
from vattn.units import format_bytes

HERE = Path(__file__).parent
SLOTS = 8
MAX_TOKENS = 600
MIB = 2**20
LIVE, MAPPED, PARKED, STATIC = "#2b62b3", "#8fb4e3", "#e0b36a", "#9a9a9a"
BUDGET = "4MiB"  # less than the queue would leave mapped, so that pages are parked, reused and taken back


@dataclass(frozen=True)
class Run:
    """One pass of the queue.

    Attributes:
        seconds: from the first request's arrival to the last one's end.
        steps: what each step did.
        pages: what every slot held after each step; empty for `paged`, which has no pages.
        total_pages: the budget, in the backend's unit.
        static_tokens: the tokens of a slot if all of its memory were reserved: `max_model_len`.
        static_bytes: what all slots would take then: `max_num_seqs` times `max_model_len` tokens.
    """

    kv: str
    seconds: float
    outputs: list[RequestOutput]
    steps: list[StepRecord]
    pages: list[list[SlotPages]]
    total_pages: int
    static_tokens: int
    static_bytes: int

    @property
    def held(self) -> int:
        """The most bytes that running requests held."""
        return max(step.kv.used_bytes for step in self.steps)

    @property
    def live(self) -> int:
        """The most bytes that live tokens took."""
        return max(step.kv.live_bytes for step in self.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo queue with both KV backends.")
    parser.add_argument("--model", default=str(HERE / "model"), help="path or hub id")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "memory.png", help="the picture to write")
    args = parser.parse_args()

    # A model this small gains nothing from a second thread, and threads that wait for each other make times jump.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = demo_prompts()
    model.train(False)
    parameters = f"{model.num_parameters() / 1e6:.1f} M parameters in float32"
    print(f"{len(prompts)} prompts, {SLOTS} at a time; {parameters}, CPU\n")
    expected = generate_alone(model, tokenizer, prompts)
    runs = [run(model, tokenizer, prompts, kv) for kv in ("virtual", "paged")]

    for index, output in enumerate(runs[0].outputs):
        print_request(index, output)
    print_table(runs, expected)
    draw(runs, args.out)
    print(f"\nphysical memory over time and the page map: {args.out}")


def generate_alone(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[list[int]]:
    """The tokens that transformers' own greedy `generate` answers to each prompt, one prompt at a time."""
    answers = []
    for prompt in tqdm(prompts, desc="generate, one by one", unit="req", dynamic_ncols=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        answers.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], kv: str) -> Run:
    """The whole queue through the engine with one backend."""
    steps: list[StepRecord] = []
    pages: list[list[SlotPages]] = []
    outputs: dict[str, RequestOutput] = {}
    with LLM(
        model,
        kv=kv,
        tokenizer=tokenizer,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,  # the picture is of what requests hold
        memory_budget=BUDGET,
        kv_options={"page_size": 4096} if kv == "virtual" else None,  # small pages for a small model: 32 tokens
        on_step=steps.append,
    ) as llm:
        start = time.monotonic()
        for index, prompt in enumerate(prompts):
            llm.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        with tqdm(total=len(prompts), desc=f"{kv:>20}", unit="req", dynamic_ncols=True) as bar:
            while llm.has_unfinished():
                for output in llm.step():
                    if output.finished:
                        outputs[output.request_id] = output
                        bar.update()
                if isinstance(llm.kv, VirtualKV):
                    pages.append(llm.kv.cache.page_map())
        seconds = time.monotonic() - start
        llm.check()
        total, longest = llm.kv.total(), llm.max_model_len
        static = SLOTS * longest * llm.token_bytes
    answers = [outputs[str(index)] for index in range(len(prompts))]
    return Run(kv, seconds, answers, steps, pages, total, longest, static)


def print_request(index: int, output: RequestOutput) -> None:
    completion, metrics = output.outputs[0], output.metrics
    prompt = (output.prompt or "").strip()
    shown = prompt if len(prompt) <= 100 else f"{prompt[:60]} ... {prompt[-36:]}"
    text = completion.text.strip()
    first, last = metrics.time_to_first_token or 0, metrics.latency or 0
    counts = f"{len(output.prompt_token_ids):4} + {len(completion.token_ids):3} tokens"
    print(f"[{index:2}] {counts}, {completion.finish_reason}, first after {first:5.2f} s, all after {last:5.2f} s")
    print(f"     {' '.join(shown.split())}")
    print(f"     -> {text if len(text) <= 160 else text[:110] + ' ... ' + text[-46:]}")


def print_table(runs: list[Run], expected: list[list[int]]) -> None:
    """Both runs, one column each."""

    def row(name: str, *cells: str) -> None:
        print(f"  {name:<44}" + "".join(f"{cell:>16}" for cell in cells))

    print()
    row("", *(r.kv for r in runs))
    last = [r.steps[-1].kv for r in runs]
    tokens = [sum(len(o.outputs[0].token_ids) for o in r.outputs) for r in runs]
    row("output tokens per second", *(f"{n / r.seconds:.0f}" for n, r in zip(tokens, runs, strict=True)))
    row("reserved virtual memory", *(format_bytes(kv.reserved_bytes) for kv in last))
    row("peak physical KV memory", *(format_bytes(kv.peak_physical_bytes) for kv in last))
    row("  of it held by running requests, at most", *(format_bytes(r.held) for r in runs))
    row(
        f"  a static reservation, {SLOTS} x {runs[0].static_tokens} tokens",
        *(format_bytes(r.static_bytes) for r in runs),
    )
    row("waste: held by requests without a live token", *(f"{waste(r):.1%}" for r in runs))
    row("map calls", *(str(kv.map_calls) for kv in last))
    row("steps", *(str(len(r.steps)) for r in runs))
    row("time that steps waited for the driver", *(f"{kv.wait_seconds * 1e3:.1f} ms" for kv in last))
    row("preemptions", *(str(sum(s.num_preempted for s in r.steps)) for r in runs))
    for r in runs:
        same = sum(o.outputs[0].token_ids == ids for o, ids in zip(r.outputs, expected, strict=True))
        verdict = "every answer" if same == len(expected) else f"only {same} of {len(expected)} answers"
        print(f"  {r.kv} agrees with transformers' generate in {verdict}, token for token")


def waste(r: Run) -> float:
    """Share of the memory that running requests held, on average over the steps, which had no live token in it."""
    used = sum(s.kv.used_bytes for s in r.steps)
    return sum(s.kv.waste_bytes for s in r.steps) / used if used else 0.0


def draw(runs: list[Run], path: Path) -> None:
    """Memory beside a static reservation, memory of both runs over their steps, and the virtual run's page map."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, grid = pyplot.subplots(2, 2, figsize=(12, 7.4), layout="constrained")
    axes = grid.flat
    draw_reservation(runs, axes[0])
    top = max(s.kv.physical_bytes for r in runs for s in r.steps) / MIB
    for axis, r in zip(axes[1:3], runs, strict=True):
        for color, label, values in (
            (PARKED, "physical, not in use", [s.kv.physical_bytes for s in r.steps]),
            (MAPPED, "held by running requests", [s.kv.used_bytes for s in r.steps]),
            (LIVE, "live tokens", [s.kv.live_bytes for s in r.steps]),
        ):
            axis.fill_between(range(len(values)), [v / MIB for v in values], color=color, label=label)
        axis.set(title=f"{r.kv}: KV memory", xlabel="step", ylabel="MiB", xlim=(0, len(r.steps) - 1), ylim=(0, top))
        axis.legend(loc="upper right", framealpha=0.9, fontsize=8)

    axis = axes[3]
    pages = runs[0].pages
    # The fullest moment at which a good part of the slots still runs.
    busy = [step for step, slots in enumerate(pages) if sum(slot.active for slot in slots) >= SLOTS / 2]
    moment = max(busy, key=lambda step: sum(slot.pages for slot in pages[step] if not slot.active), default=0)
    for slot in pages[moment]:
        axis.barh(slot.reqid, slot.mapped, color=MAPPED if slot.active else PARKED)
        axis.barh(slot.reqid, slot.length, color=LIVE)
    held = sum(s.pages for s in pages[moment] if s.active)
    parked = sum(s.pages for s in pages[moment] if not s.active)
    free = runs[0].total_pages - held - parked
    axis.set(
        title=f"page map at step {moment}: {held} held, {parked} parked, {free} free",
        xlabel="token",
        ylabel="slot (reqid)",
    )
    axis.invert_yaxis()
    handles = [Patch(color=color) for color in (LIVE, MAPPED, PARKED)]
    axis.legend(handles, ["live tokens", "mapped ahead of them", "parked"], framealpha=0.9, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_reservation(runs: list[Run], axis: Any) -> None:
    """The most that running requests held in each run, beside what a static reservation holds for as many."""
    bars = [
        (f"static: {SLOTS} x {runs[0].static_tokens} tokens", runs[0].static_bytes, STATIC),
        *((f"{r.kv}: held by running requests", r.held, MAPPED) for r in runs),
        ("live tokens", max(r.live for r in runs), LIVE),
    ]
    names, sizes, colors = zip(*bars, strict=True)
    drawn = axis.barh(range(len(bars)), [size / MIB for size in sizes], color=colors)
    axis.bar_label(drawn, [format_bytes(size) for size in sizes], padding=3, fontsize=8)
    axis.set_yticks(range(len(bars)), names, fontsize=8)
    axis.set(
        title=f"KV memory of {SLOTS} requests at a time, at its peak", xlabel="MiB", xlim=(0, 1.2 * max(sizes) / MIB)
    )
    axis.invert_yaxis()


if __name__ == "__main__":
    main()
