"""Hundreds of random requests through a pool that is too small for them, beside the same ones undisturbed.

Everything that comes from outside happens at random, by a seed: late arrivals, priorities, prompts with common starts,
sampling parameters of all kinds, requests that must be refused, aborts in every state, exceptions and NaN in the model.
Memory is short enough for requests to lose their cache often, by both ways. Whatever happens, a request ends once, its
tokens are those that a roomy engine gives it, as far as it got, and nothing is left behind. Half of the runs have
drafts.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.backends import CACHING_KVS, KVS, PAGED_WINDOWS, chosen
from tests.support.effort import covering, effort
from tests.support.target import EXAMPLES
from tests.support.tiny_models import VOCAB, make_smallest_model, make_tokenizer
from vattn.engine import LLM, InvalidRequest, RequestOutput, SamplingParams
from vattn.engine.model.forward import Forward
from vattn.engine.scheduling.scheduler import Entry, Scheduler

MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 8
MAX_NUM_BATCHED_TOKENS = 48
NUM_PREFIXES = 4
MEMORY = 12 * 8192  # one and a half of the longest requests
HEADROOM = 2  # that admission leaves: little, so that requests often grow out of their memory
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

Tokens = dict[tuple[str, int], list[int]]


@dataclass(frozen=True)
class Job:
    """A request to come.

    Attributes:
        step: when it comes.
        abort_after: steps after its arrival when it is aborted, if it has not ended; None for never.
        bad: it must be refused.
    """

    name: str
    prompt: Any
    params: dict[str, Any]
    priority: int
    step: int
    abort_after: int | None = None
    bad: bool = False


def make_jobs(seed: int, count: int) -> list[Job]:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(2, VOCAB) for _ in range(rng.randint(40, 90))] for _ in range(NUM_PREFIXES)]
    jobs = []
    step = 0
    for number in range(count):
        # Bursts, and now and then a pause in which the engine may become idle.
        step += rng.choice([0, 0, 0, 1, 3, 6]) if rng.random() < 0.995 else 300
        length = min(rng.randint(1, 40), rng.randint(1, 40))
        prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
        if rng.random() < 0.4:
            prefix = rng.choice(prefixes)
            prompt = prefix[: rng.choice([len(prefix), rng.randint(1, len(prefix))])] + prompt[:20]
        job = Job(
            name=f"job-{number}",
            prompt=prompt,
            params=make_params(rng),
            priority=rng.randint(-2, 2),
            step=step,
            abort_after=rng.choice([0, 1, 3, 10, 30]) if rng.random() < 0.12 else None,
        )
        jobs.append(spoiled(job, rng) if rng.random() < 0.05 else job)
    return jobs


def make_params(rng: random.Random) -> dict[str, Any]:
    """Keywords of `SamplingParams`: each request has a seed of its own, so that its tokens are its own."""
    params: dict[str, Any] = {
        "max_tokens": rng.choice([1, 4, 12, 25, 25, 25, rng.randint(30, 200)]),
        "temperature": 0.0,
    }
    if rng.random() < 0.5:
        params |= {"temperature": rng.choice([0.3, 1.0, 1.7]), "seed": rng.getrandbits(40)}
        params["n"] = rng.choice([1, 1, 1, 2, 4])
    extras: list[dict[str, Any]] = [
        {"top_k": rng.randint(1, 50)},
        {"top_p": rng.uniform(0.5, 1)},
        {"min_p": rng.uniform(0, 0.2)},
        {"repetition_penalty": rng.uniform(0.8, 1.5)},
        {"frequency_penalty": rng.uniform(0, 1), "presence_penalty": rng.uniform(-1, 1)},
        {"logit_bias": {rng.randrange(VOCAB): rng.uniform(-5, 5)}},
        {"stop_token_ids": rng.sample(range(VOCAB), 4)},
        {"stop": [f"w{rng.randrange(2, VOCAB)}", f"{rng.randrange(10)} w{rng.randrange(1, 10)}"]},
        {"stop_token_ids": [rng.randrange(VOCAB)], "min_tokens": params["max_tokens"] // 2},
        {"bad_words": [f"w{rng.randrange(2, VOCAB)}"]},
        {"allowed_token_ids": rng.sample(range(VOCAB), 30)},
        {"logprobs": rng.randint(0, 3)},
        {"prompt_logprobs": rng.randint(0, 2)},
    ]
    for extra in rng.sample(extras, rng.choice([0, 0, 1, 2, 3])):
        params |= extra
    return params


def spoiled(job: Job, rng: random.Random) -> Job:
    """A job that has to be refused."""
    prompt, params = rng.choice(
        [
            ([], job.params),
            ([*job.prompt, VOCAB], job.params),
            ([-1], job.params),
            ([3] * MAX_MODEL_LEN, job.params),
            (job.prompt, {**job.params, "stop_token_ids": [VOCAB + 1]}),
            ({"prompt_token_ids": job.prompt, "cache_salt": 5}, job.params),
        ]
    )
    return Job(job.name, prompt, params, job.priority, job.step, bad=True)


def make_llm(kv: str, **options: Any) -> LLM:
    sizes = {"page_size": 8192, "layout": "fused"} if kv == "virtual" else {}
    defaults = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "block_size": 16 if kv == PAGED_WINDOWS else 8,
        "kv_options": sizes,
        "tokenizer": make_tokenizer(),
    }
    return LLM(make_smallest_model(), **chosen(kv, **{**defaults, **options}))


@functools.cache
def undisturbed(seed: int, count: int) -> Tokens:
    """What each request gets where there is room for all of them, and nothing is shared, aborted or failing."""
    jobs = [job for job in make_jobs(seed, count) if not job.bad]
    with make_llm(
        "static", max_num_seqs=48, max_num_batched_tokens=1024, memory_budget="64MiB", enable_prefix_caching=False
    ) as llm:
        outputs = llm.generate(
            [job.prompt for job in jobs], [SamplingParams(**job.params) for job in jobs], use_tqdm=False
        )
    return {
        (job.name, completion.index): completion.token_ids
        for job, output in zip(jobs, outputs, strict=True)
        for completion in output.outputs
    }


@dataclass
class Run:
    """What happened to all jobs: how each ended, once, and what it had then."""

    ended: dict[str, RequestOutput] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # were in a step that was made to fail
    num_preempted: int = 0
    num_saved: int = 0
    num_steps: int = 0
    hit_tokens: int = 0

    def end(self, output: RequestOutput) -> None:
        assert output.finished
        assert output.request_id not in self.ended, "a request ended twice"
        self.ended[output.request_id] = output

    def summary(self) -> dict[str, list[tuple[list[int], str, str | None, int | str | None]]]:
        return {
            name: [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
            for name, output in self.ended.items()
        }


class Injected(RuntimeError):
    """What a model may raise."""


def run_jobs(llm: LLM, jobs: Sequence[Job], seed: int, failure_rate: float, nan_rate: float = 0) -> Run:
    """Drive the engine step by step through all jobs to their ends; asserts what must hold at every moment."""
    rng = random.Random(seed)
    run = Run()
    compute = llm.core.runner.run

    def fail_at_times(entries: Sequence[Entry]) -> Forward:
        if rng.random() < failure_rate:
            run.failed.update(entry.request.parent_id for entry in entries)
            # Before the model, or after it has stored keys and values.
            if rng.random() < 0.5:
                compute(entries)
            raise Injected
        if rng.random() < nan_rate:
            run.failed.update(entry.request.parent_id for entry in entries)
            embeddings = llm.model.get_input_embeddings()
            handle = embeddings.register_forward_hook(lambda module, args, output: output * math.nan)
            try:
                return compute(entries)
            finally:
                handle.remove()
        return compute(entries)

    llm.core.runner.run = fail_at_times  # type: ignore[method-assign]
    llm.on_step = lambda record: setattr(run, "num_preempted", run.num_preempted + record.num_preempted)
    to_come = list(reversed(jobs))
    aborts: dict[int, list[str]] = {}
    deadlines: dict[str, int] = {}
    step = 0
    while to_come or llm.has_unfinished():
        while to_come and to_come[-1].step <= step:
            job = to_come.pop()
            try:
                llm.add_request(job.name, job.prompt, SamplingParams(**job.params), priority=job.priority)
            except InvalidRequest:
                run.refused.add(job.name)
                continue
            if job.abort_after is not None:
                aborts.setdefault(step + job.abort_after, []).append(job.name)
            deadlines[job.name] = step + serial_steps(llm.core.scheduler)
        for name in aborts.pop(step, ()):
            aborted = llm.abort(name)
            assert (aborted is None) == (name in run.ended)
            if aborted is not None:
                run.end(aborted)
        if llm.has_unfinished():
            for output in llm.step():
                if output.finished:
                    run.end(output)
                    if llm.core.scheduler.policy == "fcfs":
                        assert step <= deadlines[output.request_id], "others were served out of turn"
            run.num_steps += 1
        if step % 25 == 0:
            llm.check()
        if not llm.has_unfinished():
            assert_idle(llm)
        step += 1
    llm.core.runner.run = compute  # type: ignore[method-assign]
    llm.on_step = None
    swap = llm.core.scheduler.swap
    assert swap is not None
    run.num_saved = swap.num_saved
    run.hit_tokens = llm.core.scheduler.hit_tokens
    return run


def serial_steps(scheduler: Scheduler) -> int:
    """Steps that all its requests would take one after the other, each beside decodes that have their token first."""
    chunk = scheduler.max_num_batched_tokens - MAX_NUM_SEQS + 1
    return sum(
        math.ceil(request.num_tokens / chunk) + request.max_total_tokens - request.num_tokens
        for request in (*scheduler.running, *scheduler.waiting)
    )


def assert_idle(llm: LLM) -> None:
    llm.check()
    assert llm.core.kv.available() == llm.core.kv.total()
    stats = llm.core.kv.stats()
    assert stats.used_bytes == stats.live_bytes == 0
    swap = llm.core.scheduler.swap
    assert swap is not None
    assert swap.used_bytes == 0
    assert not llm.core.scheduler.running
    assert not llm.core.scheduler.waiting


def assert_right(run: Run, jobs: Sequence[Job], want: Tokens) -> None:
    """Every job ended once with a legal reason, and has the tokens that it has alone, as far as it got."""
    assert run.refused == {job.name for job in jobs if job.bad}
    assert set(run.ended) | run.refused == {job.name for job in jobs}
    by_name = {job.name: job for job in jobs}
    for name, output in run.ended.items():
        job = by_name[name]
        params = SamplingParams(**job.params)
        assert [completion.index for completion in output.outputs] == list(range(params.n))
        for completion in output.outputs:
            tokens, whole = completion.token_ids, want[name, completion.index]
            reason = completion.finish_reason
            assert tokens == whole[: len(tokens)], f"{name} has other tokens than alone"
            if reason == "error":
                assert isinstance(output.error, Injected | FloatingPointError)
                assert name in run.failed
            elif reason == "abort":
                assert job.abort_after is not None
            else:
                assert reason == ("stop" if completion.stop_reason is not None else "length")
                assert tokens == whole
            if params.logprobs is not None:
                assert completion.logprobs is not None
                assert [next(iter(report)) for report in completion.logprobs] == tokens
                assert all(math.isfinite(value.logprob) for report in completion.logprobs for value in report.values())
        if params.prompt_logprobs is not None and all(c.finish_reason in ("stop", "length") for c in output.outputs):
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(job.prompt)


# With the default of 50 examples; mode `engine` of the campaign runs for as long as asked.
COUNTS = dict.fromkeys(("virtual", "paged", PAGED_WINDOWS), effort(3, 5) * EXAMPLES) | {
    "dynamic": 2 * EXAMPLES,
    "static": 2 * EXAMPLES,
}


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "policy"), covering(KVS, ["fcfs", "priority"]))
def test_stress(kv: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.engine.scheduling.scheduler.HEADROOM_TOKENS", HEADROOM)
    count = COUNTS[kv]
    jobs = make_jobs(1, count)
    with make_llm(
        kv,
        memory_budget=MEMORY if kv != "static" else 4 * MAX_MODEL_LEN * 256,
        scheduling_policy=policy,
        preemption_mode="swap",
        speculative_config=DRAFTS if policy == "priority" else None,
        swap_space=40 * 256,  # one or two copies: what finds no room is computed again
    ) as llm:
        run = run_jobs(llm, jobs, seed=2, failure_rate=0.01, nan_rate=0.005)
        assert (llm.speculation.num_accepted_tokens > 0) == (policy == "priority")
    assert_right(run, jobs, undisturbed(1, count))
    reasons = {completion.finish_reason for output in run.ended.values() for completion in output.outputs}
    assert reasons == {"stop", "length", "abort", "error"}
    if kv != "static":
        assert run.num_preempted > run.num_saved > 0, "both ways of preemption were to be seen"
    if kv not in ("static", "dynamic"):
        assert run.hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kv", effort(("virtual",), CACHING_KVS))
def test_a_seed_repeats(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.engine.scheduling.scheduler.HEADROOM_TOKENS", HEADROOM)
    jobs = make_jobs(3, effort(60, 120))
    summaries = []
    for _ in range(2):
        with make_llm(kv, memory_budget=MEMORY, preemption_mode="swap", swap_space=40 * 256) as llm:
            summaries.append(run_jobs(llm, jobs, seed=4, failure_rate=0.02, nan_rate=0.01).summary())
    assert summaries[0] == summaries[1]
