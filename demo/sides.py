"""Two engines side by side: the same model and prompts, over two KV backends that take turns.

Whatever else the machine does then slows both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vattn import SlotPages
from vattn.engine.kv.base import KVStats
from vattn.engine.kv.virtual import VirtualKV
from vattn.engine.llm import LLM
from vattn.engine.requests.outputs import RequestOutput
from vattn.engine.requests.sampling import SamplingParams

SIDES = ("virtual", "paged")


@dataclass
class Side:
    """What one engine did.

    Attributes:
        seconds: of each step.
        decodes: of each step, the tokens that it computed if it only decoded; otherwise 0.
        kv: the backend's figures after each step.
        pages: what every slot held after each step; empty for `paged`, which has no pages.
        outputs: by the place of their prompt.
        budget: pages or blocks in all.
        preemptions: how often a request lost its memory.
        after_sleep: physical bytes once the engine sleeps; None if it cannot give its memory back.
    """

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    kv: list[KVStats] = field(default_factory=list)
    pages: list[list[SlotPages]] = field(default_factory=list)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    budget: int = 0
    preemptions: int = 0
    after_sleep: int | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """The output of each prompt."""
        return [[*self.outputs[place].outputs[0].token_ids] for place in range(len(self.outputs))]

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / sum(self.seconds)

    @property
    def decode_speed(self) -> float:
        """Tokens per second of the steps that only decoded."""
        return sum(self.decodes) / sum(
            seconds for seconds, tokens in zip(self.seconds, self.decodes, strict=True) if tokens
        )

    @property
    def needed(self) -> int:
        """The most bytes that running requests needed."""
        return max(kv.used_bytes for kv in self.kv)

    @property
    def live(self) -> int:
        """The most bytes that live tokens took."""
        return max(kv.live_bytes for kv in self.kv)

    @property
    def waste(self) -> float:
        """Share of the memory that running requests needed, over all steps, which had no live token in it."""
        used = sum(kv.used_bytes for kv in self.kv)
        return sum(kv.waste_bytes for kv in self.kv) / used if used else 0.0

    def step(self) -> list[RequestOutput]:
        """One step, timed; what is noted of it is not."""
        waiting = len(self.llm.core.scheduler.waiting)
        decoding = [request.state.name == "DECODING" for request in self.llm.core.scheduler.running]
        start = time.perf_counter()
        outputs = self.llm.step()
        self.seconds.append(time.perf_counter() - start)
        only = all(decoding) and waiting == len(self.llm.core.scheduler.waiting)
        self.decodes.append(len(decoding) if only else 0)
        self.kv.append(self.llm.core.kv.stats())
        if isinstance(self.llm.core.kv, VirtualKV):
            self.pages.append(self.llm.core.kv.cache.page_map())
        return outputs


def run(
    model: PreTrainedModel,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    title: str,
    watch: Callable[[Side], object] = lambda _: None,
    kinds: Sequence[str] = SIDES,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> dict[str, Side]:
    """Runs all prompts through an engine of each kind.

    Args:
        prompts: text, or token ids where there is no tokenizer.
        title: of the progress bar, which counts output tokens.
        watch: called after each step.
        options: of `LLM`.
    """
    with ExitStack() as stack, tqdm(desc=f"{title:>25}", unit="token", dynamic_ncols=True) as bar:
        sides = {kv: Side(stack.enter_context(LLM(model, kv=kv, tokenizer=tokenizer, **options))) for kv in kinds}
        for side in sides.values():
            for place, prompt in enumerate(prompts):
                side.llm.add_request(str(place), prompt, params)
        turn = list(sides.values())
        while any(side.llm.has_unfinished() for side in turn):
            turn.reverse()  # the one that comes second finds the model's weights in the caches
            for side in turn:
                if side.llm.has_unfinished():
                    for output in side.step():
                        if output.finished:
                            side.outputs[int(output.request_id)] = output
                            bar.update(len(output.outputs[0].token_ids))
                    watch(side)
        for side in sides.values():
            side.llm.check()
            side.budget, side.preemptions = side.llm.core.kv.total(), side.llm.core.figures.preemptions
            if isinstance(side.llm.core.kv, VirtualKV):
                side.llm.sleep()
                side.after_sleep = side.llm.core.kv.stats().physical_bytes
    return sides


def generate_alone(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> list[list[int]]:
    """The tokens that transformers' own greedy `generate` answers to each prompt, one prompt at a time."""
    answers = []
    with tqdm(desc=f"{'transformers, one by one':>25}", unit="token", dynamic_ncols=True) as bar:
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **options
            )
            answers.append(answer[0, len(prompt) :].tolist())
            bar.update(len(answers[-1]))
    return answers
