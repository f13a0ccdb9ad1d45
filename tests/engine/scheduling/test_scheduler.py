"""The scheduler alone, over a real paged backend: order, budget, admission, preemption, and that it never sticks."""

from __future__ import annotations

import random
import sys

import pytest

from vattn.engine import FinishReason, InvalidRequest, SamplingParams
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.spec import KVSpec
from vattn.engine.requests.request import Request, State
from vattn.engine.scheduling.drafts import NgramProposer, SpeculativeConfig
from vattn.engine.scheduling.scheduler import HEADROOM_TOKENS, Policy, Scheduler, StepPlan
from vattn.errors import ConfigError
from vattn.packed import KVShape

BLOCK = 4


def make_scheduler(
    *, blocks: int = 1000, max_num_seqs: int = 4, max_num_batched_tokens: int = 16, policy: Policy = "fcfs"
) -> Scheduler:
    kv = PagedKV(
        KVSpec(KVShape.uniform(1, 1, 1, 1), max_num_seqs=max_num_seqs, max_model_len=10_000, block_size=BLOCK),
        num_blocks=blocks,
    )
    return Scheduler(kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, policy=policy)


def make(name: str, prompt: int, max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, [1] * prompt, params, max_total_tokens=prompt + max_tokens, seed=0)


def run(scheduler: Scheduler, plan: StepPlan) -> None:
    """What the engine does with a plan, without a model."""
    scheduler.kv.prepare(plan.lengths, plan.next_lengths)
    for entry in plan.entries:
        samples = entry.samples
        entry.request.advance(entry.end)
        if samples:
            entry.request.append(0)
            if entry.request.state is State.DONE:
                scheduler.release(entry.request)
    scheduler.check()
    scheduler.kv.check()


def shown(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(entry.request.request_id, entry.start, entry.end) for entry in plan.entries]


def test_chunked_prefill_is_mixed_with_decodes_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for name, prompt in (("a", 3), ("b", 20), ("c", 5)):
        scheduler.add(make(name, prompt))
    plans = []
    for _ in range(5):
        plan = scheduler.schedule()
        plans.append(shown(plan))
        run(scheduler, plan)
    assert plans == [
        [("a", 0, 3), ("b", 0, 7)],
        [("a", 3, 4), ("b", 7, 16)],
        [("a", 4, 5), ("b", 16, 20), ("c", 0, 5)],
        [("a", 5, 6), ("b", 20, 21), ("c", 5, 6)],
        [("b", 21, 22), ("c", 6, 7)],
    ]


def test_a_step_that_needs_no_memory_does_not_ask_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at the books of a cache takes longer than planning the step, also while others wait for a slot."""
    scheduler = make_scheduler(max_num_seqs=2)
    looks: list[int] = []
    available = scheduler.kv.available
    monkeypatch.setattr(scheduler.kv, "available", lambda: looks.append(1) or available())
    for name in "abc":
        scheduler.add(make(name, BLOCK, max_tokens=3 * BLOCK))
    counts = []
    for _ in range(1 + 2 * BLOCK):
        before = len(looks)
        plan = scheduler.schedule()
        counts.append(len(looks) - before)
        run(scheduler, plan)
    assert [bool(count) for count in counts] == [True, True, False, False, False, True, False, False, False]


def test_memory_for_all_that_may_start_in_a_step_is_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each request would wait until other engines have given back what it alone lacks."""
    asked: list[tuple[int, int]] = []
    held = 18  # blocks that another engine has

    def borrow(units: int, following: int = 0) -> int:
        nonlocal held
        asked.append((units, following))
        given = min(held, units + following)
        held -= given
        return given

    monkeypatch.setattr(PagedKV, "loan", property(lambda _: object()))
    scheduler = make_scheduler(blocks=20, max_num_seqs=5)
    available = scheduler.kv.available
    monkeypatch.setattr(scheduler.kv, "available", lambda: available() - held)
    monkeypatch.setattr(scheduler.kv, "borrow", borrow)
    for name in "abcdef":
        scheduler.add(make(name, BLOCK))  # two blocks each; the fifth does not fit the tokens of a step
    plan = scheduler.schedule()
    assert [name for name, *_ in shown(plan)] == ["a", "b", "c", "d"]
    assert asked == [(2, 4)], "the first one does not wait for others' memory, nor do those after the second"


def test_a_long_prompt_leaves_room_for_others_if_there_are_any() -> None:
    scheduler = make_scheduler()
    scheduler.long_prefill = 5
    scheduler.add(make("long", 40))
    plan = scheduler.schedule()
    assert shown(plan) == [("long", 0, 16)], "alone it gets the whole step"
    run(scheduler, plan)
    scheduler.add(make("a", 3))
    scheduler.add(make("b", 12))
    plans = []
    for _ in range(4):
        plan = scheduler.schedule()
        plans.append(shown(plan))
        run(scheduler, plan)
    assert plans == [
        [("long", 16, 21), ("a", 0, 3), ("b", 0, 5)],
        [("a", 3, 4), ("long", 21, 26), ("b", 5, 10)],
        [("a", 4, 5), ("long", 26, 31), ("b", 10, 12)],
        [("a", 5, 6), ("b", 12, 13), ("long", 31, 36)],
    ]


def test_who_waits_for_the_start_of_a_long_prompt_holds_nobody_back() -> None:
    """It keeps its place, and computes nothing that the other one has computed."""
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=60)
    scheduler.prefix_caching, scheduler.long_prefill = True, 40
    for name, prompt in (("long", 100), ("same", 100), ("a", 3), ("b", 3)):
        scheduler.add(make(name, prompt))
    plans = []
    for _ in range(5):
        plan = scheduler.schedule()
        plans.append(shown(plan))
        run(scheduler, plan)
        for request in scheduler.running:
            scheduler.publish(request)
    assert plans == [
        [("long", 0, 40), ("a", 0, 3)],
        [("a", 3, 4), ("long", 40, 80)],
        [("a", 4, 5), ("long", 80, 100)],
        [("long", 100, 101), ("a", 5, 6), ("same", 96, 100)],
        [("long", 101, 102), ("same", 100, 101), ("b", 0, 3)],
    ]


def test_decodes_get_their_token_beside_a_long_prefill() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=4)
    scheduler.add(make("a", 2, max_tokens=9))
    run(scheduler, scheduler.schedule())
    scheduler.add(make("long", 30))
    scheduler.add(make("b", 2, max_tokens=9))
    for _ in range(4):
        plan = scheduler.schedule()
        assert plan.num_tokens == 4
        assert shown(plan)[0][0] == "a"
        run(scheduler, plan)


def test_next_lengths_announce_the_next_chunk_of_unfinished_prefills_only() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make("a", 3))
    scheduler.add(make("b", 12))
    plan = scheduler.schedule()
    slots = {entry.request.request_id: entry.request.slot for entry in plan.entries}
    assert plan.lengths == {slots["a"]: 3, slots["b"]: 7}
    assert plan.next_lengths == {slots["b"]: 12}


def test_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make(name, 2))
    assert [name for name, _, _ in shown(scheduler.schedule())] == ["a", "b"]
    assert [request.request_id for request in scheduler.waiting] == ["c"]


def test_admission_accounts_for_what_runs() -> None:
    """Memory that is free now, but that a running prefill still needs, is not given to a newcomer."""
    scheduler = make_scheduler(blocks=12, max_num_batched_tokens=8)
    scheduler.add(make("a", 40))  # 11 of 12 blocks, of which the first step takes 2
    run(scheduler, scheduler.schedule())
    assert scheduler.kv.available() == 10
    scheduler.add(make("b", 4))
    while any(request.request_id == "a" for request in scheduler.running):
        plan = scheduler.schedule()
        assert {name for name, _, _ in shown(plan)} == {"a"}
        assert not plan.preempted
        run(scheduler, plan)
    assert shown(scheduler.schedule()) == [("b", 0, 4)]


def test_the_youngest_is_preempted_and_goes_to_the_head_of_the_queue() -> None:
    grow = HEADROOM_TOKENS + 40
    need = -(-(4 + grow) // BLOCK)
    scheduler = make_scheduler(blocks=need + need // 2 + 8, max_num_seqs=2)
    for name in ("old", "young", "later"):
        scheduler.add(make(name, 4, max_tokens=grow))
    victims = []
    for _ in range(10_000):
        plan = scheduler.schedule()
        if not plan.entries:
            break
        if plan.preempted:
            victims.append([request.request_id for request in plan.preempted])
            assert scheduler.waiting[0] is plan.preempted[-1]
            assert plan.preempted[0].num_computed_tokens == 0
        run(scheduler, plan)
    assert victims[0] == ["young"]
    assert not any("old" in names for names in victims)
    assert not scheduler.has_unfinished()
    assert scheduler.kv.available() == scheduler.kv.total()


def test_priorities() -> None:
    """Lower runs earlier and is preempted later, whenever it came; among equals the earlier one."""
    grow = HEADROOM_TOKENS + 40
    need = -(-(4 + grow) // BLOCK)
    scheduler = make_scheduler(blocks=need + need // 2 + 8, max_num_seqs=2, policy="priority")
    for name, priority in (("late", 9), ("first", 1), ("second", 1), ("urgent", -3)):
        request = make(name, 4, max_tokens=grow)
        request.priority = priority
        scheduler.add(request)
    assert [request.request_id for request in scheduler.waiting] == ["urgent", "first", "second", "late"]
    ended: list[str] = []
    while scheduler.has_unfinished():
        running = list(scheduler.running)
        plan = scheduler.schedule()
        for victim in plan.preempted:
            assert victim is max(running, key=lambda r: (r.priority, r.arrival_number))
        run(scheduler, plan)
        ended += [r.request_id for r in running if r.state is State.DONE]
    assert ended == ["urgent", "first", "second", "late"]


def test_a_prefill_of_high_priority_takes_no_decode_s_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, policy="priority")
    scheduler.add(make("low", 3, max_tokens=20))
    run(scheduler, scheduler.schedule())
    urgent = make("urgent", 30)
    urgent.priority = -1
    scheduler.add(urgent)
    for _ in range(5):
        plan = scheduler.schedule()
        assert {name for name, _, _ in shown(plan)} == {"low", "urgent"}
        run(scheduler, plan)


def test_a_victim_that_was_planned_already_leaves_the_plan() -> None:
    """Decodes are planned first; a prefill of a better rank may still take the memory of one."""
    scheduler = make_scheduler(blocks=21, max_num_batched_tokens=80, max_num_seqs=2, policy="priority")
    low = make("low", 8, max_tokens=60)
    scheduler.add(low)
    run(scheduler, scheduler.schedule())
    urgent = make("urgent", 8, max_tokens=90)
    urgent.priority = -1
    urgent.admit(scheduler.kv.allocate(8))
    urgent.prompt_token_ids += [1] * 85
    scheduler.running.append(urgent)
    plan = scheduler.schedule()
    assert plan.preempted == (low,)
    assert {name for name, _, _ in shown(plan)} == {"urgent"}
    assert plan.num_tokens == 79
    scheduler.kv.prepare(plan.lengths)


def test_a_draft_preempts_nobody() -> None:
    """The last block is for the token of a later request."""
    scheduler = make_scheduler(blocks=37, max_num_seqs=2)
    first, last = make("first", 6, max_tokens=120), make("last", 8, max_tokens=120)
    scheduler.add(first)
    scheduler.add(last)
    for _ in range(65):
        run(scheduler, scheduler.schedule())
    assert (first.num_tokens, last.num_tokens, scheduler.kv.available()) == (71, 73, 1)
    scheduler.proposer = NgramProposer(SpeculativeConfig(num_speculative_tokens=4))
    plan = scheduler.schedule()
    assert not plan.preempted
    assert [(entry.request, len(entry.draft)) for entry in plan.entries] == [(first, 0), (last, 0)]


def test_a_long_draft_keeps_nobody_waiting() -> None:
    """Who is admitted beside it has memory, though the draft could have taken all of that."""
    scheduler = make_scheduler(blocks=40, max_num_batched_tokens=1000)
    drafted, comes = make("drafted", 10, max_tokens=400), make("comes", 20)
    scheduler.add(drafted)
    for _ in range(10):
        run(scheduler, scheduler.schedule())
    scheduler.proposer = NgramProposer(SpeculativeConfig(num_speculative_tokens=128))
    assert [len(entry.draft) for entry in scheduler.schedule().entries] == [128]
    scheduler.add(comes)
    plan = scheduler.schedule()
    assert [(entry.request, len(entry.draft)) for entry in plan.entries] == [(drafted, HEADROOM_TOKENS), (comes, 0)]
    scheduler.kv.prepare(plan.lengths)


def test_a_request_that_can_never_fit_is_refused_with_the_figures() -> None:
    scheduler = make_scheduler(blocks=10)
    with pytest.raises(InvalidRequest, match=r"41 tokens, which takes 11 .* there are 10"):
        scheduler.check_fits(make("big", 37))
    fits = make("fits", 36)
    scheduler.check_fits(fits)
    scheduler.add(fits)
    while scheduler.has_unfinished():
        run(scheduler, scheduler.schedule())


def test_finish_frees_in_every_state() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    requests = [make("decoding", 2), make("prefilling", 30), make("waiting", 2)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, scheduler.schedule())
    assert [request.state.value for request in requests] == [request.request_id for request in requests]
    for request in requests:
        scheduler.finish(request, FinishReason.ABORT)
        scheduler.finish(request, FinishReason.ERROR)
        assert request.finish_reason is FinishReason.ABORT
        scheduler.check()
    assert not scheduler.has_unfinished()
    assert scheduler.kv.available() == scheduler.kv.total()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "raise the one or lower the other"),
    ],
)
def test_bad_limits(limits: dict[str, int], message: str) -> None:
    kv = make_scheduler().kv
    with pytest.raises(ConfigError, match=message):
        Scheduler(kv, **{"max_num_seqs": 4, "max_num_batched_tokens": 16, **limits})


@pytest.mark.parametrize("seed", range(30))
def test_random_loads_always_end(seed: int) -> None:
    """Whatever comes, every request finishes with all of its tokens, in a bounded number of steps."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        blocks=rng.randint(12, 80),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(6, 40),
        policy=rng.choice(["fcfs", "priority"]),
    )
    requests = []
    for i in range(rng.randint(1, 12)):
        request = make(str(i), rng.randint(1, 60), rng.randint(1, 150))
        request.priority = rng.randint(-2, 2)
        try:
            scheduler.check_fits(request)
        except InvalidRequest:
            continue
        scheduler.add(request)
        requests.append(request)
    aborted = set()
    for _ in range(5000):
        if not scheduler.has_unfinished():
            break
        plan = scheduler.schedule()
        assert 0 < plan.num_tokens <= scheduler.max_num_batched_tokens
        run(scheduler, plan)
        if requests and rng.random() < 0.01:
            victim = rng.choice(requests)
            if victim.state is not State.DONE:
                aborted.add(victim.request_id)
            scheduler.finish(victim, FinishReason.ABORT)
    assert not scheduler.has_unfinished()
    for request in requests:
        if request.request_id not in aborted:
            assert request.num_tokens == request.max_total_tokens
    assert scheduler.kv.available() == scheduler.kv.total()


def test_admission_costs_the_same_per_request_however_many_run() -> None:
    """Function calls, which unlike seconds are the same every time."""

    def calls_per_request(count: int) -> float:
        kv = PagedKV(KVSpec(KVShape.uniform(1, 1, 1, 1), max_num_seqs=count, max_model_len=128), num_blocks=8 * count)
        scheduler = Scheduler(kv, max_num_seqs=count, max_num_batched_tokens=128 * count, prefix_caching=True)
        for number in range(count):
            prompt = [number, *range(70)]
            scheduler.add(Request(str(number), prompt, SamplingParams(), max_total_tokens=80, seed=0))
        calls = 0

        def count_calls(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count_calls)
        try:
            plan = scheduler.schedule()
        finally:
            sys.setprofile(None)
        assert len(plan.entries) == count
        return calls / count

    assert calls_per_request(400) < 1.2 * calls_per_request(50)
