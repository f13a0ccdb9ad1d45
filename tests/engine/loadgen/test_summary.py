"""The figures of a run, against values worked out by hand from given timestamps."""

from __future__ import annotations

import pytest

from vattn.engine.loadgen.summary import (
    DETAILS,
    Timing,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    summarize,
    table,
)
from vattn.errors import ConfigError

# TTFT 1/2, 1/4 and 3/2; ITL 1/8, 3/8 and 1/4; E2EL 1, 1/2 and 3/2. The first has 5 tokens in 3 chunks: TPOT (1/2) / 4.
TIMINGS = [
    Timing(10.0, [10.5, 10.625, 11.0], prompt_tokens=7, output_tokens=5, text="abc"),
    Timing(10.25, [10.5, 10.75], prompt_tokens=3, output_tokens=2, queued=0.05),
    Timing(12.0, [13.5], prompt_tokens=2, output_tokens=1),
    Timing(12.0, [12.5], prompt_tokens=50, output_tokens=40, error="503: full"),
]
DURATION = 4.0


def run(**options: object) -> dict[str, object]:
    return summarize(TIMINGS, DURATION, **options)  # type: ignore[arg-type]


def test_throughput_counts_requests_that_succeeded() -> None:
    result = run()
    assert (result["completed"], result["failed"], result["duration"]) == (3, 1, 4.0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12, 8)
    assert result["request_throughput"] == 0.75
    assert result["output_throughput"] == 2.0
    assert result["total_token_throughput"] == 5.0
    assert result["request_goodput"] is None


@pytest.mark.parametrize(
    ("metric", "mean", "median", "std", "p50", "p90"),
    [
        # numpy's linear interpolation: p90 of three values lies 0.8 of the way from the second to the third.
        ("ttft", 750, 500, 540.061725, 500, 1300),
        ("tpot", 187.5, 187.5, 62.5, 187.5, 237.5),
        ("itl", 250, 250, 102.062073, 250, 350),
        ("e2el", 1000, 1000, 408.248290, 1000, 1400),
    ],
)
def test_latencies(metric: str, mean: float, median: float, std: float, p50: float, p90: float) -> None:
    result = run(metrics=[metric], percentiles=[50.0, 90.0])
    found = [result[f"{name}_{metric}_ms"] for name in ("mean", "median", "std", "p50", "p90")]
    assert found == pytest.approx([mean, median, std, p50, p90])
    assert [key for key in result if key.endswith("_ms")] == [
        f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p50", "p90")
    ]


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        ({"ttft": 500.0}, 2),
        ({"ttft": 499.0}, 1),
        ({"tpot": 125.0}, 2),  # the request of one token has none, and meets any
        ({"e2el": 1000.0}, 2),
        ({"ttft": 500.0, "tpot": 125.0, "e2el": 1500.0}, 1),
    ],
)
def test_goodput(goodput: dict[str, float], good: int) -> None:
    assert run(goodput=goodput)["request_goodput"] == good / DURATION


def test_peaks_are_of_whole_seconds() -> None:
    result = run()
    assert result["max_output_tokens_per_s"] == 4.0  # of the second from 10.0 on, in chunks
    assert result["max_concurrent_requests"] == 2


def test_details_are_in_the_order_of_the_requests() -> None:
    result = run()
    assert result["ttfts"] == [0.5, 0.25, 1.5, 0.5]
    assert result["itls"] == [[0.125, 0.375], [0.25], [], []]
    assert result["latencies"] == [1.0, 0.5, 1.5, 0.5]
    assert result["input_lens"] == [7, 3, 2, 50]
    assert result["output_lens"] == [5, 2, 1, 0]
    assert result["start_times"] == [10.0, 10.25, 12.0, 12.0]
    assert result["queue_times"] == [0.0, 0.05, 0.0, 0.0]
    assert result["generated_texts"] == ["abc", "", "", ""]
    assert result["errors"] == ["", "", "", "503: full"]
    assert set(DETAILS) <= result.keys()


def test_a_run_in_which_all_failed_has_figures_of_zero() -> None:
    result = summarize([Timing(1.0, error="no")], 2.0, goodput={"ttft": 1.0})
    assert (result["completed"], result["failed"], result["request_goodput"]) == (0, 1, 0.0)
    assert (result["mean_ttft_ms"], result["p99_itl_ms"], result["max_concurrent_requests"]) == (0.0, 0.0, 0)


def test_the_table() -> None:
    lines = table({**run(percentiles=[99.0, 99.9]), "max_concurrency": 2, "request_rate": "inf"}).splitlines()
    assert {len(line) for line in (lines[0], lines[-1])} == {50}
    shown = {line[:40].strip(): line[40:].strip() for line in lines}
    assert shown["Successful requests:"] == "3"
    assert shown["Maximum request concurrency:"] == "2"
    assert shown["Output token throughput (tok/s):"] == "2.00"
    assert shown["Mean TTFT (ms):"] == "750.00"
    assert shown["Median ITL (ms):"] == "250.00"
    assert {"P99 TPOT (ms):", "P99.9 TPOT (ms):"} <= shown.keys()
    assert not {"Request goodput (req/s):", "Request rate configured (RPS):", "Mean E2EL (ms):"} & shown.keys()


def test_texts_of_flags() -> None:
    assert parse_goodput(["ttft:200", "e2el:1500.5"]) == {"ttft": 200.0, "e2el": 1500.5}
    assert parse_metrics("ttft, itl") == ["ttft", "itl"]
    assert parse_percentiles("50,99.9") == [50.0, 99.9]


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_goodput, ["itl:5"], "one of ttft, tpot, e2el"),
        (parse_goodput, ["ttft"], "METRIC:MILLISECONDS"),
        (parse_goodput, ["ttft:-1"], "METRIC:MILLISECONDS"),
        (parse_metrics, "ttft,x", "has 'x'; choose from ttft,tpot,itl,e2el"),
        (parse_percentiles, "50,101", "from 0 to 100"),
        (parse_percentiles, "half", "from 0 to 100"),
    ],
)
def test_texts_that_are_refused(parse: object, text: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)  # type: ignore[operator]
