"""The demo's queue through the engine: short and long requests, mixed, with real answers of their natural length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from demo.prompts import prompts as demo_prompts
from vattn.engine.llm import LLM
from vattn.engine.requests.outputs import RequestOutput
from vattn.engine.requests.sampling import SamplingParams
from vattn.engine.scheduling.record import StepRecord

MODEL = Path(__file__).parents[1] / "demo" / "model"
MAX_TOKENS = 600


@dataclass(frozen=True)
class Queue:
    """The model that ships with the project, in float32, and its prompts as text and tokens."""

    model: PreTrainedModel
    texts: list[str]
    token_ids: list[list[int]]

    @classmethod
    def load(cls) -> Queue:
        model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
        texts = demo_prompts()
        return cls(model, texts, [tokenizer(text)["input_ids"] for text in texts])

    def first(self, count: int) -> Queue:
        """The same model with the first `count` prompts."""
        return Queue(self.model, self.texts[:count], self.token_ids[:count])

    def title(self, index: int) -> str:
        """A prompt shortened to a table's cell."""
        text = " ".join(self.texts[index].replace("Question:", "").replace("Answer:", "").split())
        return text if len(text) <= 40 else f"{text[:37]}..."


@dataclass(frozen=True)
class Pass:
    """One run of a queue.

    Attributes:
        seconds: from the arrival of all requests to the end of the last.
        outputs: in the order of the prompts.
        records: one per step.
        idle_steps: per request, the steps for which its slot was kept after its end.
    """

    seconds: float
    outputs: list[RequestOutput]
    records: list[StepRecord]
    idle_steps: list[int]

    @property
    def output_tokens(self) -> list[int]:
        return [len(output.outputs[0].token_ids) for output in self.outputs]

    @property
    def cached_tokens(self) -> list[int]:
        """Tokens of each request in the cache at its end; the last token is never stored."""
        return [
            len(output.prompt_token_ids) + n - 1 for output, n in zip(self.outputs, self.output_tokens, strict=True)
        ]


def run_queue(queue: Queue, *, max_tokens: int = MAX_TOKENS, **options: Any) -> Pass:
    """Runs all prompts at once through an engine with `options`, greedily."""
    records: list[StepRecord] = []
    outputs: dict[str, RequestOutput] = {}
    ended: dict[str, int] = {}
    kept: dict[str, int] = {}
    with one_thread(), LLM(queue.model, on_step=records.append, enable_prefix_caching=False, **options) as llm:
        for index, ids in enumerate(queue.token_ids):
            llm.add_request(str(index), ids, SamplingParams(temperature=0, max_tokens=max_tokens))
        while llm.has_unfinished():
            for output in llm.step():
                if output.finished:
                    outputs[output.request_id] = output
                    ended[output.request_id] = len(records)
            batch_goes_on = options.get("scheduling") == "static" and llm.core.scheduler.running
            if not batch_goes_on:
                kept |= {name: len(records) - step for name, step in ended.items() if name not in kept}
    names = [str(index) for index in range(len(queue.token_ids))]
    arrival = min(output.metrics.arrival_time for output in outputs.values())
    return Pass(
        seconds=max(output.metrics.finished_time or 0 for output in outputs.values()) - arrival,
        outputs=[outputs[name] for name in names],
        records=records,
        idle_steps=[kept[name] for name in names],
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: a second gains nothing with a model this small, and their waiting adds noise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
