"""The engine under everything at once, for as long as asked: `python -m tests.engine.soak --minutes 60 --seed 1`.

A round is an engine of random options, short of memory, and the random requests of `test_stress` in it: late arrivals,
common starts, salts, several completions, drafts, aborts, preemption in both ways, exceptions and NaN in the model.
Then come calls of `generate` and `beam_search` that an interrupt may end at any moment, and the same calls again.
Tokens are compared with those of an undisturbed engine, books are checked throughout, and each round ends with no
memory in use. What fails is raised, with the seed of its round, by which it can be run again: `--seed N --rounds 1`.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch

from tests.engine import test_stress as stress
from vattn.engine import LLM, BeamSearchParams, SamplingParams
from vattn.engine.scheduling import scheduler

JOBS = 150
CALLS = 12


def soak(seed: int, minutes: float, rounds: int | None) -> Counter[str]:
    """Run rounds, of seed `seed` and those after it, for that long; what was seen, by name."""
    torch.set_num_threads(1)
    logging.getLogger("vattn").setLevel(logging.CRITICAL)
    scheduler.HEADROOM_TOKENS = stress.HEADROOM
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    seen: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end if rounds is None else seen["rounds"] < rounds:
        current = seed + seen["rounds"]
        try:
            one_round(current, seen)
        except BaseException as error:
            error.add_note(f"in the round of seed {current}: python -m tests.engine.soak --seed {current} --rounds 1")
            raise
        seen["rounds"] += 1
        if seen["rounds"] % 10 == 0:
            print(f"{seen['rounds']} rounds: {dict(seen)}", flush=True)
    return seen


def one_round(seed: int, seen: Counter[str]) -> None:
    rng = random.Random(seed)
    plain = stress.make_jobs(seed, JOBS)
    jobs = [salted(job, rng) for job in plain]
    want = stress.undisturbed.__wrapped__(seed, JOBS)
    beams = [BeamSearchParams(beam_width=rng.randint(2, 4), max_tokens=rng.randint(2, 12)) for _ in range(3)]
    prompts = [job.prompt for job in jobs if not job.bad][:8]
    with stress.make_llm("static", memory_budget="8MiB", enable_prefix_caching=False) as roomy:
        found = [roomy.beam_search(prompts, params) for params in beams]

    drafts = stress.DRAFTS if rng.random() < 0.5 else None
    with stress.make_llm(
        rng.choice(["virtual", "paged"]),
        memory_budget=rng.choice([stress.MEMORY, 2 * stress.MEMORY, 8 * stress.MEMORY]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        preemption_mode=rng.choice(["swap", "recompute", "auto"]),
        swap_space=rng.choice([60 * 256, "1MiB"]),
        enable_prefix_caching=rng.random() < 0.8,
        speculative_config=drafts,
        max_num_batched_tokens=rng.choice([16, stress.MAX_NUM_BATCHED_TOKENS, 200]),
    ) as llm:
        seen[f"rounds {llm.kv.name}"] += 1
        run = stress.run_jobs(llm, jobs, seed, failure_rate=rng.choice([0, 0.01]), nan_rate=rng.choice([0, 0.01]))
        stress.assert_right(run, plain, want)
        for output in run.ended.values():
            seen.update(str(completion.finish_reason) for completion in output.outputs)
        seen["steps"] += run.num_steps
        seen["preempted"] += run.num_preempted
        seen["saved"] += run.num_saved
        seen["hit tokens"] += run.hit_tokens
        seen["accepted drafts"] += llm.speculation.num_accepted_tokens
        good = [job for job in jobs if not job.bad]
        for _ in range(CALLS):
            some = rng.sample(good, rng.randint(1, 12))
            generate(llm, some, want, rng, seen)
            which = rng.randrange(len(beams))
            if beams[which].beam_width * max(map(length, prompts)) < 300:
                beam_search(llm, prompts, beams[which], found[which], rng, seen)


def generate(llm: LLM, jobs: list[stress.Job], want: stress.Tokens, rng: random.Random, seen: Counter[str]) -> None:
    """A call of `generate` that is interrupted, or ends before; and the same one undisturbed."""
    prompts = [job.prompt for job in jobs]
    params = [SamplingParams(**job.params) for job in jobs]
    interrupted(lambda: llm.generate(prompts, params, use_tqdm=False), rng, seen)
    stress.assert_idle(llm)
    for job, output in zip(jobs, llm.generate(prompts, params, use_tqdm=False), strict=True):
        for completion in output.outputs:
            assert completion.token_ids == want[job.name, completion.index], f"{job.name} has other tokens than alone"
    stress.assert_idle(llm)


def beam_search(
    llm: LLM, prompts: list[Any], params: BeamSearchParams, want: list[Any], rng: random.Random, seen: Counter[str]
) -> None:
    interrupted(lambda: llm.beam_search(prompts, params), rng, seen)
    stress.assert_idle(llm)
    for output, reference in zip(llm.beam_search(prompts, params), want, strict=True):
        assert [each.tokens for each in output.sequences] == [each.tokens for each in reference.sequences]
        seen["beams"] += len(output.sequences)
    stress.assert_idle(llm)


def interrupted(call: Callable[[], object], rng: random.Random, seen: Counter[str]) -> None:
    """The call, with a KeyboardInterrupt at a random moment unless it ends before."""
    kind = "not interrupted"
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(-4, -0.5))
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        kind = "interrupted"
    seen[kind] += 1


def salted(job: stress.Job, rng: random.Random) -> stress.Job:
    """Some of the prompts of one tenant or another."""
    if job.bad or rng.random() < 0.6:
        return job
    return replace(job, prompt={"prompt_token_ids": job.prompt, "cache_salt": rng.choice(["one", "two"])})


def length(prompt: Any) -> int:
    return len(prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt) + 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="so many rounds, in place of a time")
    arguments = parser.parse_args()
    seen = soak(arguments.seed, arguments.minutes, arguments.rounds)
    print(f"nothing wrong in {dict(seen)}")


if __name__ == "__main__":
    main()
