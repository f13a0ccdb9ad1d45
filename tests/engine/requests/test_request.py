"""The request's state machine: the legal ways, and that nothing else passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from vattn.engine import FinishReason, IllegalTransition, SamplingParams
from vattn.engine.requests.request import Request, State


def make(prompt: int = 3, max_tokens: int = 4, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(
        "r",
        list(range(prompt)),
        params,
        max_total_tokens=prompt + max_tokens,
        seed=0,
        stop_token_ids=frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else {50}),
    )


def into(state: State) -> Request:
    """A request that has come to `state` by legal steps."""
    request = make()
    if state is State.WAITING:
        return request
    request.admit(1)
    if state is State.DECODING:
        request.advance(3)
        request.append(7)
    elif state is State.PREEMPTED:
        request.preempt()
    elif state is State.DONE:
        request.finish(FinishReason.ABORT)
    assert request.state is state
    return request


STEPS: dict[str, tuple[Callable[[Request], None], set[State]]] = {
    "admit": (lambda r: r.admit(0), {State.WAITING, State.PREEMPTED}),
    "advance": (lambda r: r.advance(r.num_tokens), {State.PREFILLING, State.DECODING}),
    "preempt": (lambda r: r.preempt(), {State.PREFILLING, State.DECODING}),
    "finish": (lambda r: r.finish(FinishReason.ERROR), set(State) - {State.DONE}),
    "append": (lambda r: r.append(5), set()),  # legal only after `advance`
}


@pytest.mark.parametrize(("step", "state"), list(itertools.product(STEPS, State)))
def test_only_legal_transitions(step: str, state: State) -> None:
    act, legal = STEPS[step]
    request = into(state)
    if state in legal:
        act(request)
        return
    before = (request.state, request.num_computed_tokens, list(request.output_token_ids), request.slot)
    with pytest.raises(IllegalTransition, match="r"):
        act(request)
    assert before == (request.state, request.num_computed_tokens, request.output_token_ids, request.slot)


def test_a_life_with_preemption() -> None:
    request = make(prompt=3, max_tokens=3)
    request.admit(2)
    request.advance(2)
    assert (request.state, request.num_uncomputed_tokens) == (State.PREFILLING, 1)
    request.advance(3)
    request.append(9)
    assert (request.state, request.num_uncomputed_tokens) == (State.DECODING, 1)
    request.preempt()
    assert (request.slot, request.num_computed_tokens, request.num_tokens) == (None, 0, 4)
    request.admit(0)
    request.advance(4)
    request.append(8)
    request.advance(5)
    request.append(7)
    assert request.state is State.DONE
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [9, 8, 7]
    assert request.num_preemptions == 1


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({}, 50, FinishReason.STOP),
        ({"ignore_eos": True}, 50, None),
        ({"stop_token_ids": [60]}, 60, FinishReason.STOP),
        ({"stop_token_ids": [60], "ignore_eos": True}, 60, FinishReason.STOP),
        ({}, 60, None),
    ],
)
def test_stop_tokens(sampling: dict[str, object], token: int, reason: FinishReason | None) -> None:
    request = make(**sampling)
    request.admit(0)
    request.advance(3)
    request.append(token)
    assert request.finish_reason is reason
    assert request.stop_reason == (token if reason else None)
    assert request.output_token_ids == [token]


def test_token_ids_crosses_from_prompt_to_output() -> None:
    request = make(prompt=3)
    request.output_token_ids = [10, 11, 12]
    every = [0, 1, 2, 10, 11, 12]
    for start in range(6):
        for end in range(start, 7):
            assert request.token_ids(start, end) == every[start:end]
