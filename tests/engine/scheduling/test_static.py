"""Static batching: who runs together, what is reserved for how long, and that the tokens are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.backends import chosen
from tests.support.tiny_models import expected, make_model, make_prompts
from vattn.engine import LLM, FinishReason, InvalidRequest, SamplingParams, StepRecord
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.requests.request import Request, State
from vattn.engine.scheduling.scheduler import StepPlan
from vattn.engine.scheduling.static import StaticScheduler
from vattn.errors import ConfigError, OutOfPages
from vattn.packed import KVShape

BLOCK, LENGTH = 4, 1000


def make_scheduler(*, blocks: int = 1000, max_num_seqs: int = 4, max_num_batched_tokens: int = 16) -> StaticScheduler:
    kv = PagedKV(
        KVSpec(KVShape.uniform(1, 1, 1, 1), max_num_seqs=max_num_seqs, max_model_len=LENGTH, block_size=BLOCK),
        num_blocks=blocks,
    )
    return StaticScheduler(
        kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=LENGTH
    )


def make(name: str, prompt: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, [1] * prompt, params, max_total_tokens=prompt + max_tokens, seed=0)


def run(scheduler: StaticScheduler, plan: StepPlan) -> list[str]:
    """What the engine does with a plan, without a model; the names of the requests that got a token."""
    if plan.reserve:
        scheduler.kv.prepare(plan.reserve)
    scheduler.kv.prepare(plan.lengths, plan.next_lengths)
    names = []
    for entry in plan.entries:
        samples = entry.samples
        entry.request.advance(entry.end)
        if samples:
            names.append(entry.request.request_id)
            entry.request.append(0)
            if entry.request.state is State.DONE:
                scheduler.release(entry.request)
    scheduler.check()
    scheduler.kv.check()
    return names


def test_a_batch_runs_until_its_slowest_ends() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name, max_tokens in (("short", 1), ("long", 4), ("next", 2), ("last", 1)):
        scheduler.add(make(name, 3, max_tokens))
    steps = []
    while scheduler.has_unfinished():
        steps.append(run(scheduler, scheduler.schedule()))
    assert steps == [["short", "long"], ["long"], ["long"], ["long"], ["next", "last"], ["next"]]
    assert scheduler.kv.available() == scheduler.kv.total()


def test_every_slot_is_reserved_at_the_longest_prompt_and_output_until_the_end() -> None:
    scheduler = make_scheduler()
    for name, prompt, max_tokens in (("talks", 4, 40), ("reads", 60, 1)):
        scheduler.add(make(name, prompt, max_tokens))
    held = set()
    while scheduler.has_unfinished():
        held.add(scheduler.kv.total() - scheduler.kv.available())
        run(scheduler, scheduler.schedule())
    assert held == {0, 2 * 25}  # blocks of 4 for 60 + 40 tokens
    assert scheduler.kv.available() == scheduler.kv.total()


def test_padding_ends_with_the_context() -> None:
    scheduler = make_scheduler()
    scheduler.add(make("talks", 4, 990))
    scheduler.add(make("reads", 900, 10))
    plan = scheduler.schedule()
    assert set(plan.reserve.values()) == {LENGTH}


def test_a_batch_is_as_large_as_memory_holds_its_padding() -> None:
    scheduler = make_scheduler(blocks=30)
    for name, prompt, max_tokens in (("a", 8, 32), ("b", 8, 32), ("reads", 40, 8), ("c", 8, 32)):
        scheduler.add(make(name, prompt, max_tokens))  # 10, 10, 12 blocks alone; 18 each together
    batches = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        names = sorted(request.request_id for request in scheduler.running)
        if not batches or (not scheduler.finished_slots and names != batches[-1]):
            batches.append(names)
        run(scheduler, plan)
    assert batches == [["a", "b"], ["reads"], ["c"]]


def test_aborts_in_every_state() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    requests = [make("decoding", 2, 9), make("prefilling", 30, 9), make("waiting", 2, 9)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, scheduler.schedule())
    assert [request.state.value for request in requests] == [request.request_id for request in requests]
    for request in requests:
        scheduler.finish(request, FinishReason.ABORT)
        scheduler.check()
    assert not scheduler.has_unfinished()
    assert scheduler.kv.available() == scheduler.kv.total()


@pytest.mark.parametrize("seed", range(20))
def test_random_loads_always_end(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(
        blocks=rng.randint(12, 80), max_num_seqs=rng.randint(1, 6), max_num_batched_tokens=rng.randint(6, 40)
    )
    requests = []
    for i in range(rng.randint(1, 12)):
        request = make(str(i), rng.randint(1, 60), rng.randint(1, 150))
        try:
            scheduler.check_fits(request)
        except InvalidRequest:
            continue
        scheduler.add(request)
        requests.append(request)
    for _ in range(5000):
        if not scheduler.has_unfinished():
            break
        plan = scheduler.schedule()
        assert 0 < plan.num_tokens <= scheduler.max_num_batched_tokens
        run(scheduler, plan)
        if requests and rng.random() < 0.01:
            scheduler.finish(rng.choice(requests), FinishReason.ABORT)
    assert not scheduler.has_unfinished()
    assert scheduler.kv.available() == scheduler.kv.total()


def test_tokens_are_those_of_generate_alone(kv: str) -> None:
    """And the finished request's output comes when it ends, while its memory stays."""
    prompts = make_prompts([1, 23, 5, 40, 12])
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 14, 2, 9, 14)]
    records: list[StepRecord] = []
    ended: dict[str, int] = {}
    got: dict[str, list[int]] = {}
    with LLM(
        make_model("llama"),
        **chosen(
            kv,
            scheduling="static",
            max_num_seqs=3,
            max_num_batched_tokens=11,
            kv_options={"page_size": 4096, "eager_pages": 0} if kv == "virtual" else None,
            on_step=records.append,
        ),
    ) as llm:
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            llm.add_request(str(i), prompt, param)
        while llm.has_unfinished():
            for output in llm.step():
                got[output.request_id] = output.outputs[0].token_ids
                if output.finished:
                    ended[output.request_id] = len(records)
            llm.check()
        assert llm.core.kv.available() == llm.core.kv.total()
    assert list(got.values()) == [
        expected("llama", prompt, param.max_tokens) for prompt, param in zip(prompts, params, strict=True)
    ]
    assert ended["0"] < ended["2"] < ended["1"] < ended["3"] < ended["4"]
    # From the end of the first request to that of its batch no memory comes back.
    used = [record.kv.used_bytes for record in records[ended["0"] - 1 : ended["1"] - 1]]
    assert used == sorted(used)


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window"])
def test_prompts_in_chunks_where_layers_have_windows(family: str) -> None:
    """What is reserved for a batch is not taken for tokens that have left the window."""
    prompts = make_prompts([150, 5, 180])
    want = [expected(family, prompt, 20) for prompt in prompts]
    options = {"page_size": 4096, "layout": "fused"}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 100}
    with LLM(make_model(family), kv="virtual", scheduling="static", kv_options=options, **limits) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        llm.check()
        assert llm.core.kv.available() == llm.core.kv.total()
    assert [output.outputs[0].token_ids for output in outputs] == want


def test_a_batch_has_memory_for_what_is_reserved_where_layers_have_windows() -> None:
    """A slot is reserved in one step, in which no token leaves a window: each takes over 15 pages."""
    options = {"kv": "virtual", "scheduling": "static", "kv_options": {"page_size": 4096, "layout": "fused"}}
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    prompts = make_prompts([150, 140])
    want = [expected("mistral-window", prompt, 20) for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=20)
    with LLM(make_model("mistral-window"), memory_budget=20 * 4096, **options, **limits) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    assert [output.metrics.num_preemptions for output in outputs] == [0, 0]
    assert [output.outputs[0].token_ids for output in outputs] == want
    with (
        LLM(make_model("mistral-window"), memory_budget=15 * 4096, **options, **limits) as llm,
        pytest.raises(InvalidRequest, match="there are 15 in all"),
    ):
        llm.generate(prompts, sampling, use_tqdm=False)


def test_a_step_with_nothing_to_do() -> None:
    with LLM(make_model("llama"), kv="static", scheduling="static") as llm:
        assert llm.step() == []


def test_preemption_where_the_backend_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that the accounting could not foresee: the youngest leaves the batch, and runs in the next."""
    prompts = make_prompts([20, 21, 22])
    with LLM(make_model("llama"), kv="paged", scheduling="static", max_num_seqs=3) as llm:
        prepare = llm.core.kv.prepare

        def refuse(lengths: dict[int, int], *rest: Any, **options: Any) -> None:
            if len(lengths) > 2:
                raise OutOfPages("not three", missing_pages=1, missing_bytes=1)
            prepare(lengths, *rest, **options)

        monkeypatch.setattr(llm.core.kv, "prepare", refuse)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        llm.check()
    assert [output.metrics.num_preemptions for output in outputs] == [0, 0, 1]
    assert [output.outputs[0].token_ids for output in outputs] == [expected("llama", p, 5) for p in prompts]


def test_a_batch_whose_last_request_is_preempted_ends() -> None:
    """Other engines may take the memory of a pool in the middle of a batch."""
    scheduler = make_scheduler(max_num_seqs=2)
    for name, max_tokens in (("ends", 1), ("goes on", 8), ("next", 8)):
        scheduler.add(make(name, 4, max_tokens))
    run(scheduler, scheduler.schedule())
    assert scheduler.finished_slots
    assert scheduler.preempt_last().request_id == "goes on"
    scheduler.check()
    assert scheduler.kv.available() == scheduler.kv.total()
    assert run(scheduler, scheduler.schedule()) == ["goes on", "next"]


def test_static_scheduling_has_no_priorities() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy='priority' needs scheduling='continuous'"):
        LLM(make_model("llama"), scheduling="static", scheduling_policy="priority")
