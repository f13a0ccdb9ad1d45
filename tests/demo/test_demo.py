"""The model that ships answers, stops, and shows what it is for: answers of very different lengths."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import corpus, run, shows, sides
from demo.prompts import prompts, questions_about_the_story
from tests.support.paths import ROOT
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


@pytest.mark.slow(7)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("budget", [run.TOKENS * 2560, pytest.param(2**30, marks=pytest.mark.long)])
def test_by_default_virtual_needs_hardly_more_memory_than_paged(budget: int) -> None:
    """The whole queue of the demo, without an option for layout or pages."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "demo" / "model", dtype=torch.float32)
    done = sides.run(
        model,
        prompts(),
        SamplingParams(temperature=0, max_tokens=run.MAX_TOKENS),
        title="",
        tokenizer=AutoTokenizer.from_pretrained(ROOT / "demo" / "model"),
        max_num_seqs=run.SLOTS,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        memory_budget=budget,
    )
    virtual, paged = done["virtual"], done["paged"]
    assert virtual.tokens == paged.tokens
    assert virtual.needed <= 1.1 * paged.needed
    assert virtual.waste < 0.15
    assert virtual.after_sleep == 0
    assert paged.after_sleep is None
    assert sum(virtual.decodes) == sum(paged.decodes) > 300


@pytest.mark.slow(15)
@pytest.mark.usefixtures("one_thread")
def test_the_demo_agrees_with_transformers_and_draws_its_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "memory.png"
    monkeypatch.setattr("sys.argv", ["run", "--out", str(picture)])
    monkeypatch.setattr(run, "demo_prompts", lambda: prompts()[:8])
    monkeypatch.setattr(shows, "LONGEST", 400)
    run.main()
    printed = capsys.readouterr().out
    assert printed.count("agrees with transformers' generate in every answer") == 2
    assert re.search(r"static reservations instead, 8 x 400 tokens +7.8 MiB +7.8 MiB", printed)
    shown = {
        r"kernels run as they are +torch's attention, 4 x 368 tokens: [\d,]+ tokens/s in place, [\d,]+ over gathered",
        r"contexts grow in place +15 to 400 tokens, the most: 80.0 KiB to 1.0 MiB at one address; .* 19\d.\d MiB",
        r"prefixes are shared +8 questions about a story: 640.0 KiB on the same pages; 1.1 MiB held, 2.3 MiB apart\n",
        r"nothing is reserved +8 x 400 tokens: 7.8 MiB of addresses, and memory for those that came: \d.\d MiB",
        r"memory goes back +sleep\(\) returns (\d.\d MiB) of \1 to the machine; paged keeps its 4.0 MiB\n",
        r"All of these tokens, too, are those of transformers",
    }
    assert not [each for each in shown if not re.search(each, printed)], printed
    assert "NOT" not in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_demo_that_could_not_be_drawn_computes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run"])
    monkeypatch.setattr(run, "demo_prompts", lambda: pytest.fail("it computes"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert "needs matplotlib: pip install -e './[bench]'" in capsys.readouterr().err


def test_wrong_tokens_are_told() -> None:
    assert str(shows.Line("what", "figure")).split() == ["what", "figure"]
    assert "NOT the tokens of transformers" in str(shows.Line("what", "figure", right=False))
    model = AutoModelForCausalLM.from_pretrained(ROOT / "demo" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo" / "model")
    prompt = tokenizer(prompts()[0])["input_ids"]
    tokens = [*prompt, *sides.generate_alone(model, [prompt], 20)[0]]
    assert shows._continues(model, tokens, len(prompt))
    assert not shows._continues(model, [*tokens[:-3], 7, *tokens[-2:]], len(prompt))


def test_the_questions_about_the_story_have_its_text_in_common() -> None:
    asked = questions_about_the_story()
    assert len(set(asked)) == 8
    assert len({question[:700] for question in asked}) == 1


def test_the_corpus_is_the_same_every_time() -> None:
    first, second = (list(itertools.islice(corpus.conversations(7), 50)) for _ in range(2))
    assert first == second
    assert first != list(itertools.islice(corpus.conversations(8), 50))
