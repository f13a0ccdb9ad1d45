"""The model that ships answers, stops, and shows what it is for: answers of very different lengths."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from paths import ROOT

from demo import corpus, run
from demo.prompts import prompts
from vattn.engine import LLM, SamplingParams


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.usefixtures("one_thread")
def test_every_answer_of_the_queue_ends_by_itself_and_lengths_differ_widely() -> None:
    with LLM(str(ROOT / "demo" / "model"), dtype="float32", max_num_seqs=8, memory_budget="24MiB") as llm:
        outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=600), use_tqdm=False)
        llm.check()
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert min(lengths) < 10
    assert max(lengths) > 30 * min(lengths)
    assert "12" in outputs[0].outputs[0].text  # What is 7 + 5?
    assert "Oslo" in outputs[2].outputs[0].text  # the capital of Norway


@pytest.mark.usefixtures("one_thread")
def test_the_demo_agrees_with_generate_and_draws_its_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "memory.png"
    monkeypatch.setattr("sys.argv", ["run", "--out", str(picture)])
    monkeypatch.setattr(run, "demo_prompts", lambda: prompts()[:8])
    run.main()
    printed = capsys.readouterr().out
    assert printed.count("agrees with transformers' generate in every answer") == 2
    assert re.search(r"a static reservation, 8 x 2048 tokens +40.0 MiB +40.0 MiB", printed)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_corpus_is_the_same_every_time() -> None:
    first, second = (list(itertools.islice(corpus.conversations(7), 50)) for _ in range(2))
    assert first == second
    assert first != list(itertools.islice(corpus.conversations(8), 50))
