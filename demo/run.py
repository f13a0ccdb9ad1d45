"""The main job, to look at: `python -m demo.run`.

A queue of short and long prompts goes through the engine, with the KV cache in virtual tensors and in paged blocks, by
turns. It prints every request's text, tokens and time, and both sides in a table; then what virtual memory does that a
block table does not, each with its figure. Every answer is compared with transformers' own. The picture shows the
memory beside what static reservations take, over time, and slot by slot.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness.extras import require_matplotlib
from demo import picture, shows
from demo.prompts import prompts as demo_prompts
from demo.sides import SIDES, Side, generate_alone, run
from vattn.engine.requests.outputs import RequestOutput
from vattn.engine.requests.sampling import SamplingParams
from vattn.units import format_bytes

HERE = Path(__file__).parent
SLOTS = 8
MAX_TOKENS = 600
TOKENS = 1638  # that the memory has room for: fewer than the queue would leave mapped, so that pages are reused


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo queue with both KV backends.")
    parser.add_argument("--model", default=str(HERE / "model"), help="path or hub id")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "memory.png", help="the picture to write")
    args = parser.parse_args()
    require_matplotlib("python -m demo.run")
    began = time.monotonic()

    # For transformers' own generate: a model this small gains nothing from a second thread, and threads that wait for
    # each other make times jump on a busy machine. The engine would find out by itself.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = demo_prompts()
    model.train(False)
    # As `vattn serve` does: a collection that looks at all that was imported takes a fifth of a second, of whichever
    # side's step it falls into.
    gc.collect()
    gc.freeze()
    parameters = f"{model.num_parameters() / 1e6:.1f} M parameters in float32"
    print(f"{len(prompts)} prompts, {SLOTS} at a time; {parameters}, CPU\n", flush=True)

    token_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = generate_alone(model, token_ids, MAX_TOKENS)
    sides = run(
        model,
        prompts,
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
        title="virtual and paged, by turns",
        tokenizer=tokenizer,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=256,
        max_model_len=shows.longest(model),
        enable_prefix_caching=False,  # the table is of what requests need by themselves
        memory_budget=TOKENS * shows.token_bytes(model),
    )
    kernel = shows.same_kernel(model, [token for ids in token_ids for token in ids] * 2)
    growth, grown = shows.growth(model, tokenizer)
    shared = shows.shared(model, tokenizer)

    for index in range(len(prompts)):
        print_request(index, sides["virtual"].outputs[index])
    static = SLOTS * shows.longest(model) * grown.token_bytes
    print_table(sides, expected, static)
    lines = [kernel, growth, shared, *reservations(sides, static)]
    print("\nWhat the map calls are for, and a block table cannot do:")
    print(*lines, sep="\n")
    if all(line.right for line in lines):
        print("  All of these tokens, too, are those of transformers")
    picture.draw(sides, static, grown, args.out)
    print(f"\nmemory over time and the page map: {args.out}; {time.monotonic() - began:.0f} s in all")


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


def print_table(sides: dict[str, Side], expected: list[list[int]], static: int) -> None:
    """Both sides, one column each."""

    def row(name: str, *cells: str) -> None:
        print(f"  {name:<52}" + "".join(f"{cell:>12}" for cell in cells))

    both = [sides[kv] for kv in SIDES]
    last = [side.kv[-1] for side in both]
    print()
    row("", *SIDES)
    row("output tokens per second, step by step in turn", *(f"{side.speed:,.0f}" for side in both))
    row("KV memory that requests need, at the most", *(format_bytes(side.needed) for side in both))
    row("  share of it without a live token, on average", *(f"{side.waste:.1%}" for side in both))
    row(f"  static reservations instead, {SLOTS} x {shows.LONGEST} tokens", *(format_bytes(static) for _ in both))
    row("physical memory at the peak, idle pages included", *(format_bytes(kv.peak_physical_bytes) for kv in last))
    row("address space", *(format_bytes(kv.reserved_bytes) for kv in last))
    row("map calls, on a thread of their own", *(f"{kv.map_calls:,}" for kv in last))
    row("  time that steps waited for them", *(f"{kv.wait_seconds * 1e3:.1f} ms" for kv in last))
    row("steps; preemptions", *(f"{len(side.seconds)}; {side.preemptions}" for side in both))
    for kv, side in sides.items():
        same = sum(tokens == ids for tokens, ids in zip(side.tokens, expected, strict=True))
        verdict = "every answer" if same == len(expected) else f"only {same} of {len(expected)} answers"
        print(f"  {kv} agrees with transformers' generate in {verdict}, token for token")


def reservations(sides: dict[str, Side], static: int) -> Iterator[shows.Line]:
    """What is not reserved, and what goes back."""
    virtual, paged = (sides[kv] for kv in SIDES)
    yield shows.Line(
        "nothing is reserved",
        f"{SLOTS} x {shows.LONGEST:,} tokens: {format_bytes(static)} of addresses, and memory for those that came: "
        f"{format_bytes(virtual.needed)}",
    )
    assert virtual.after_sleep is not None
    had, has = virtual.kv[-1].physical_bytes, virtual.after_sleep
    yield shows.Line(
        "memory goes back",
        f"sleep() returns {format_bytes(had - has)} of {format_bytes(had)} to the machine; paged keeps its "
        f"{format_bytes(paged.kv[-1].physical_bytes)}",
    )


if __name__ == "__main__":
    main()
