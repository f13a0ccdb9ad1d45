"""What a progress bar of `generate` tells, and when."""

from __future__ import annotations

import functools
import io
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tiny_models import make_model
from vattn.engine import LLM, SamplingParams
from vattn.engine import progress as module


class Bar:
    """A bar that notes what it is told."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords
        self.told: list[str] = [keywords["postfix"]]
        self.finished: list[int] = []
        self.closed = False

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.told.append(text)

    def update(self, count: int) -> None:
        self.finished.append(count)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def llm() -> Any:
    with LLM(make_model("llama"), memory_budget="1MiB", max_model_len=64, max_num_seqs=2) as made:
        yield made


def test_speeds_are_told_as_tokens_come_and_prompts_as_they_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a second: 2 prompts of 3 tokens, and 8 tokens of output each."""
    now = iter(range(1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    bars: list[Bar] = []

    def make(**keywords: Any) -> Bar:
        bars.append(Bar(**keywords))
        return bars[-1]

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate([[5, 6, 7], [8, 9, 10]], params, use_tqdm=make)
    (bar,) = bars
    assert bar.keywords["total"] == 2
    assert sum(bar.finished) == 2
    assert bar.closed
    assert bar.told[0] == "input: 0.0 tokens/s, output: 0.0 tokens/s"
    assert bar.told[1] == "input: 6.0 tokens/s, output: 2.0 tokens/s", "before any prompt has ended"
    assert bar.told[-1] == "input: 0.8 tokens/s, output: 2.0 tokens/s"
    assert len(bar.told) == 9


def test_tqdm_shows_it(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    llm.generate([[5, 6, 7]])
    assert "Processed prompts: 100%" in (told := capsys.readouterr().err)
    assert "tokens/s, output: " in told
    file = io.StringIO()
    llm.enqueue([[5, 6, 7]])
    llm.wait_for_completion(use_tqdm=functools.partial(tqdm, file=file))
    assert "Processed prompts: 100%" in file.getvalue()
    llm.generate([[5, 6, 7]], use_tqdm=False)
    assert not capsys.readouterr().err
