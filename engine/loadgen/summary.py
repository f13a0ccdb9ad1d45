"""The figures of a serving benchmark, from the timings of its requests.

| figure | of a request |
| --- | --- |
| TTFT | from sending it to its first token |
| ITL | between two consecutive chunks of its stream; a chunk may carry several tokens |
| TPOT | (E2EL - TTFT) / (output tokens - 1), for two tokens or more |
| E2EL | from sending it to its last token |

Keys of the result are those of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vattn.errors import ConfigError

# In the order of the table.
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_OBJECTIVES = ("ttft", "tpot", "e2el")
_WIDTH = 50


@dataclass
class Timing:
    """What came back for one request, and when; seconds.

    Attributes:
        start: when it was sent.
        token_times: when each chunk with tokens arrived.
        prompt_tokens, output_tokens: as the server counted them; without its count, the sample's, and one per chunk.
        queued: how long it waited in the client for others to end.
        error: why it failed; None if it did not.
    """

    start: float
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    queued: float = 0.0
    text: str = ""
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.start if self.token_times else 0.0

    @property
    def e2el(self) -> float:
        return self.token_times[-1] - self.start if self.token_times else 0.0

    @property
    def tpot(self) -> float | None:
        """None for a request of fewer than two tokens."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Objectives in milliseconds, from texts such as `ttft:200`.

    Raises:
        ConfigError: an unknown metric, or no number.
    """
    objectives = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            objectives[name] = float(value)
        except ValueError:
            objectives[name] = math.nan
        if name not in _OBJECTIVES or not objectives[name] > 0:
            raise ConfigError(
                f"goodput {text!r} is no objective; give METRIC:MILLISECONDS, with one of {', '.join(_OBJECTIVES)}"
            )
    return objectives


def parse_metrics(text: str) -> list[str]:
    """The names in a comma-separated list of `METRICS`.

    Raises:
        ConfigError: another name.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(f"percentile_metrics has {unknown[0]!r}; choose from {','.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    """The numbers in a comma-separated list.

    Raises:
        ConfigError: one that is not from 0 to 100.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number <= 100 for number in numbers):
        raise ConfigError(f"metric_percentiles is {text!r}; give numbers from 0 to 100, such as 50,90,99")
    return numbers


def summarize(
    timings: Sequence[Timing],
    duration: float,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run, those of single requests included.

    Args:
        timings: of all requests, in the order of sending.
        duration: seconds from the first request to the last token.
        metrics: those of `METRICS` to report; each with mean, median, standard deviation and `percentiles`.
        goodput: objectives in milliseconds; a request is good if it meets all of them.
    """
    good = [timing for timing in timings if timing.error is None]
    total_input = sum(timing.prompt_tokens for timing in good)
    total_output = sum(timing.output_tokens for timing in good)
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(timings) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(_meets(timing, goodput) for timing in good) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    values = {
        "ttft": [timing.ttft for timing in good],
        "tpot": [timing.tpot for timing in good if timing.tpot is not None],
        "itl": [gap for timing in good for gap in timing.itl],
        "e2el": [timing.e2el for timing in good],
    }
    for metric in METRICS:
        if metric in metrics:
            milliseconds = np.array(values[metric] or [0.0]) * 1000
            result[f"mean_{metric}_ms"] = float(milliseconds.mean())
            result[f"median_{metric}_ms"] = float(np.median(milliseconds))
            result[f"std_{metric}_ms"] = float(milliseconds.std())
            for percentile in percentiles:
                result[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(milliseconds, percentile))
    return result | {
        "input_lens": [timing.prompt_tokens for timing in timings],
        "output_lens": [timing.output_tokens if timing.error is None else 0 for timing in timings],
        "ttfts": [timing.ttft for timing in timings],
        "itls": [timing.itl for timing in timings],
        "latencies": [timing.e2el for timing in timings],
        "start_times": [timing.start for timing in timings],
        "queue_times": [timing.queued for timing in timings],
        "generated_texts": [timing.text for timing in timings],
        "errors": [timing.error or "" for timing in timings],
    }


# What vLLM leaves out of a result, unless its details are asked for.
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


def _meets(timing: Timing, goodput: Mapping[str, float]) -> bool:
    """Whether a request meets all objectives; one without a TPOT meets any for it."""
    actual = {"ttft": timing.ttft, "tpot": timing.tpot or 0.0, "e2el": timing.e2el}
    return all(actual[name] * 1000 <= most for name, most in goodput.items())


def _peaks(timings: Sequence[Timing]) -> tuple[float, int]:
    """The most chunks in a second of the run, and the most requests that any second saw."""
    if not timings:
        return 0.0, 0
    first = min(timing.start for timing in timings)
    seconds = int(max(timing.start + timing.e2el for timing in timings) - first) + 1
    tokens, requests = np.zeros(seconds), np.zeros(seconds, dtype=int)
    for timing in timings:
        for time in timing.token_times:
            tokens[int(time - first)] += 1
        requests[int(timing.start - first) : int(timing.start + timing.e2el - first) + 1] += 1
    return float(tokens.max()), int(requests.max())


def table(result: Mapping[str, Any]) -> str:
    """A result as text, in vLLM's layout."""
    rows = [
        ("Successful requests:", "completed"),
        ("Failed requests:", "failed"),
        ("Maximum request concurrency:", "max_concurrency"),
        ("Request rate configured (RPS):", "request_rate"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Request goodput (req/s):", "request_goodput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ]
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_row(label, result[key]) for label, key in rows if result.get(key) not in (None, "inf")]
    for metric, title in METRICS.items():
        keys = [key for key in result if key.endswith(f"_{metric}_ms") and not key.startswith("std")]
        if keys:
            lines.append(title.center(_WIDTH, "-"))
            lines += [_row(f"{key.split('_')[0].capitalize()} {metric.upper()} (ms):", result[key]) for key in keys]
    return "\n".join([*lines, "=" * _WIDTH])


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"
