"""lm-evaluation-harness over HTTP (`local-completions`), and over the same checkpoint in transformers (`hf`).

The first sends token ids, with `echo` and `logprobs`, and reads the score of each answer out of the prompt's logprobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from tests.support.servers import MODEL, Server

FACTS = [
    {
        "question": f"What is {first} + {second}?",
        "choices": [f"{first} + {second} = {total}." for total in range(first + second - 1, first + second + 3)],
        "answer": 1,
        "sum": str(first + second),
    }
    for first in (3, 8, 17, 25)
    for second in (4, 9, 25)
]

COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "Question: {{question}}\\nAnswer:"
"""
SCORED = """
task: scored
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING = """
task: rolling
output_type: loglikelihood_rolling
doc_to_target: "Question: {{question}}\\nAnswer: {{choices[1]}} {{choices[0]}} {{choices[2]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
GENERATED = """
task: generated
output_type: generate_until
doc_to_target: "{{sum}}"
generation_kwargs: {until: ["\\n", "Question:"], max_gen_toks: 40, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
filter_list:
  - name: number
    filter: [{function: regex, regex_pattern: "(\\\\d+)\\\\.?\\\\s*$"}, {function: take_first}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder: Path = tmp_path_factory.mktemp("tasks")
    facts = folder / "facts.jsonl"
    facts.write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    for name, task in (("scored", SCORED), ("rolling", ROLLING), ("generated", GENERATED)):
        (folder / f"{name}.yaml").write_text(task + COMMON % facts)
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(tasks: TaskManager, task: str, model: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The task's metrics, and the model's answers in the order of the documents."""
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0
    )
    assert found is not None
    samples = sorted(found["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return found["results"][task], [sample["resps"] for sample in samples]


def over_http(server: Server, **options: Any) -> tuple[str, dict[str, Any]]:
    address = {"base_url": f"{server.url}/v1/completions", "model": "tiny", "tokenizer": MODEL}
    return "local-completions", {**address, "max_length": 2048, "max_retries": 1, **options}


TRANSFORMERS = ("hf", {"pretrained": MODEL, "device": "cpu", "dtype": "float32", "batch_size": 4})


@pytest.mark.parametrize("how", [{}, {"batch_size": 8}, {"num_concurrent": 6}], ids=["alone", "batch", "concurrent"])
def test_scores_are_those_of_transformers(server: Server, tasks: TaskManager, how: dict[str, Any]) -> None:
    metrics, found = evaluate(tasks, "scored", *over_http(server, **how))
    reference, want = evaluate(tasks, "scored", *TRANSFORMERS)
    assert metrics["acc,none"] == reference["acc,none"] > 0.5
    for ours, theirs in zip(found, want, strict=True):
        assert len(ours) == 4
        for ((score, greedy),), ((other, is_greedy),) in zip(ours, theirs, strict=True):
            assert score == pytest.approx(other, abs=1e-3)
            assert greedy == is_greedy


def test_perplexity_is_that_of_transformers(server: Server, tasks: TaskManager) -> None:
    metrics, _ = evaluate(tasks, "rolling", *over_http(server, batch_size=4))
    reference, _ = evaluate(tasks, "rolling", *TRANSFORMERS)
    for name in ("word_perplexity,none", "bits_per_byte,none"):
        assert metrics[name] == pytest.approx(reference[name], rel=1e-4)


@pytest.mark.parametrize("how", [{}, {"num_concurrent": 6}], ids=["alone", "concurrent"])
def test_generated_texts_are_those_of_transformers(server: Server, tasks: TaskManager, how: dict[str, Any]) -> None:
    metrics, found = evaluate(tasks, "generated", *over_http(server, **how))
    reference, want = evaluate(tasks, "generated", *TRANSFORMERS)
    assert found == want
    assert metrics == reference
    assert metrics["exact_match,number"] > 0.5
