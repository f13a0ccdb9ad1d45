"""Traces of requests, played through an engine at the times at which they arrive."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vattn.engine import LLM, SamplingParams
from vattn.engine.loadgen.arrivals import arrival_times
from vattn.engine.loadgen.summary import Timing, summarize
from vattn.engine.requests.outputs import RequestOutput


@dataclass(frozen=True)
class Arrival:
    """A request.

    Attributes:
        time: when it arrives, in seconds from the start.
        prompt: its tokens.
        output: how many tokens are asked for.
    """

    time: float
    prompt: list[int]
    output: int


@dataclass(frozen=True)
class Played:
    """What came of a trace.

    Attributes:
        seconds: from the start to the end of the last request.
        outputs: in the order of arrival.
        timings: of the requests, from the times at which they were to arrive.
    """

    seconds: float
    outputs: Sequence[RequestOutput]
    timings: Sequence[Timing]

    def summary(self, goodput: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Throughput, and medians and 99th percentiles of TTFT, TPOT and latency, under vLLM's names.

        Args:
            goodput: objectives in milliseconds, by metric.
        """
        return summarize(self.timings, self.seconds, metrics=("ttft", "tpot", "e2el"), goodput=goodput)


def log_normal(
    prompt_shape: tuple[float, float],
    output_shape: tuple[float, float],
    count: int,
    vocabulary: int,
    *,
    divisors: tuple[float, float],
    rate: float = math.inf,
    longest: int,
    shared: Sequence[int] = (),
) -> list[Arrival]:
    """Requests with log-normal lengths, divided by what brings them to a machine's size.

    Args:
        prompt_shape, output_shape: mean and deviation of the logarithm of the lengths.
        divisors: of prompts and of outputs; the deviations stay.
        rate: Poisson arrivals per second; infinite for all at once.
        longest: most tokens of a request; what is longer is cut.
        shared: tokens that every prompt begins with, in addition.
    """
    rng = random.Random(0)
    arrivals = []
    for at in arrival_times(count, rate):
        prompt, output = (
            max(2, math.ceil(rng.lognormvariate(*shape) / divisor))
            for shape, divisor in zip((prompt_shape, output_shape), divisors, strict=True)
        )
        output = min(output, longest // 2)
        prompt = min(prompt, longest - output - len(shared))
        arrivals.append(Arrival(at, [*shared, *(rng.randrange(vocabulary) for _ in range(prompt))], output))
    return arrivals


def play(llm: LLM, arrivals: Sequence[Arrival]) -> Played:
    """Adds each request at its time, or once the step has ended in which it came, and steps until all have ended."""
    waiting = list(enumerate(arrivals))
    outputs: dict[int, RequestOutput] = {}
    start = time.monotonic()
    while waiting or llm.has_unfinished():
        while waiting and waiting[0][1].time <= time.monotonic() - start:
            number, arrival = waiting.pop(0)
            sampling = SamplingParams(temperature=0, max_tokens=arrival.output, ignore_eos=True)
            llm.add_request(str(number), arrival.prompt, sampling)
        if llm.has_unfinished():
            outputs |= {int(output.request_id): output for output in llm.step()}
        else:
            time.sleep(0.001)
    seconds = time.monotonic() - start
    ordered = [outputs[number] for number in range(len(arrivals))]
    for output, arrival in zip(ordered, arrivals, strict=True):
        made = len(output.outputs[0].token_ids)
        assert made == arrival.output, f"request {output.request_id} has {made} of {arrival.output} tokens"
    timings = [_timing(start + arrival.time, output) for arrival, output in zip(arrivals, ordered, strict=True)]
    return Played(seconds, ordered, timings)


def _timing(arrival: float, output: RequestOutput) -> Timing:
    metrics = output.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    return Timing(
        arrival,
        token_times=[metrics.first_token_time, metrics.finished_time],
        prompt_tokens=len(output.prompt_token_ids),
        output_tokens=len(output.outputs[0].token_ids),
    )
