"""Ratios of records: medians, intervals, and what is called a tie."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from bench import cases
from bench.harness import records
from bench.harness.discovery import find
from bench.harness.ratios import Comparison, at, by_round, columns, interval, rows, verdict

ROOT = Path(__file__).parents[2]
RECORD = {
    "figures": [
        {"kv": "virtual", "batch": 1, "ms": 2.0, "other ms": 3.0},
        {"kv": "paged", "batch": 1, "ms": 4.0, "other ms": "-"},
        {"kv": "virtual", "batch": 8, "ms": 5.0, "other ms": 5.0},
        {"kv": "paged", "batch": 8, "ms": 4.0, "other ms": 6.0},
        {"kv": "paged", "batch": 32, "ms": 9.0, "other ms": 6.0},
    ]
}


def test_pairs_of_columns_and_of_rows() -> None:
    beside = Comparison("{}", RECORD, columns(RECORD, "other ms", "ms"))
    assert beside.values == [1.5, 1.0, 1.5, 6 / 9], "a row without a number is left out"
    alone = Comparison("{}", RECORD, columns(RECORD, "ms", where=lambda row: row["batch"] == 8))
    assert alone.values == [5.0, 4.0]
    paired = Comparison("{}", RECORD, rows(RECORD, "ms", {"kv": "paged"}, {"kv": "virtual"}, same=["batch"]))
    assert paired.values == [2.0, 0.8], "a row without its other one is left out"
    assert paired.median == 1.4


def test_rounds_of_one_case() -> None:
    record = {"series": {"a over b": [1.2, 1.4, 1.3]}}
    assert Comparison("{}", record, by_round(record, "a over b"), of="rounds").values == [1.2, 1.4, 1.3]


def test_a_new_record_of_decode_has_rounds_and_the_machine_s_limit() -> None:
    """Which the committed ones were taken without."""
    case = find(cases)["decode"].load()
    record = case.run(quick=True).record("decode", quick=True, foreign_cores=0.0)
    *_, of_rounds, limit = case.compare(record)
    assert of_rounds.of == "rounds"
    assert of_rounds.median == record["figures"][-1]["paged over virtual"]
    assert limit.is_limit
    assert limit.verdict == "limit"


def test_the_interval_is_that_of_a_bootstrap() -> None:
    """For many values the interval of a median is known: order statistics around the middle."""
    values = [float(value) for value in range(1, 102)]
    low, high = interval(values)
    assert low == pytest.approx(51 - 1.96 * 101**0.5 / 2, abs=2)
    assert high == pytest.approx(51 + 1.96 * 101**0.5 / 2, abs=2)
    assert interval(values) == (low, high), "the same in every call"
    assert interval([2.0]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="no values"):
        interval([])


@pytest.mark.parametrize(
    ("values", "higher_is_better", "expected"),
    [
        ([1.2, 1.3, 1.25], True, "ahead"),
        ([1.2, 1.3, 1.25], False, "behind"),
        ([0.8, 0.7, 0.9], True, "behind"),
        ([0.9, 1.1, 1.2], True, "tie"),
        ([1.001, 1.002, 1.003], True, "tie"),  # 1.00, as it is printed
        ([3.0, 3.1], True, "few"),
        ([0.3], True, "few"),
    ],
)
def test_a_ratio_whose_interval_includes_1_is_a_tie(values: list[float], higher_is_better: bool, expected: str) -> None:
    assert verdict(values, higher_is_better=higher_is_better) == expected


def test_every_case_compares_its_committed_records() -> None:
    """With sentences that have one place for the ratio, and values that the record's own ratios agree with."""
    found = find(cases)
    for path in sorted((ROOT / "bench" / "results").glob("*/*.json")):
        record = json.loads(path.read_text())
        compare = getattr(found[record["name"]].load(), "compare", None)
        for comparison in [] if compare is None else compare(record):
            assert comparison.says.count("{}") == 1
            assert comparison.pairs, f"{path}: {comparison.says}"
            assert all(value > 0 for value in comparison.values)
    decode = json.loads((ROOT / "bench" / "results" / "xeon-cascade-lake-2core" / "decode.json").read_text())
    paged = found["decode"].load().compare(decode)[0]
    assert paged.values == [row["paged over virtual"] for row in decode["figures"]]
    assert paged.median == median(row["paged over virtual"] for row in decode["figures"])
    assert at(decode, paged.pairs[3][0]) == decode["figures"][3]["paged over virtual"]


def test_every_case_asks_a_question() -> None:
    for case in find(cases).values():
        assert case.question.endswith("?"), f"bench/cases/{case.name}.py has no QUESTION"
        assert case.text


def test_records_of_the_repository_are_valid() -> None:
    assert records.load(ROOT / "bench" / "results", find(cases))
