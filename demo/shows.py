"""What virtual memory does that a block table does not, each with its figure, and compared with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from demo.prompts import questions_about_the_story, story_prompt
from demo.sides import SIDES, Side, generate_alone, run
from vattn.engine.kv.virtual import VirtualKV
from vattn.engine.requests.sampling import SamplingParams
from vattn.model_shapes import shape_of
from vattn.units import format_bytes

LONGEST = 2048  # tokens of a request in the demo, if its model can have more


@dataclass(frozen=True)
class Line:
    """One line of the demo.

    Attributes:
        what: what virtual memory does.
        figure: the figure that shows it.
        right: whether the tokens were those of transformers.
    """

    what: str
    figure: str
    right: bool = True

    def __str__(self) -> str:
        return f"  {self.what:<24}{self.figure}" + ("" if self.right else "; NOT the tokens of transformers")


@dataclass(frozen=True)
class Growth:
    """One request on its way to the longest context.

    Attributes:
        tokens, mapped: its length, and bytes of memory under it, after each step.
        token_bytes: of one token.
    """

    tokens: list[int]
    mapped: list[int]
    token_bytes: int


def same_kernel(model: PreTrainedModel, tokens: Sequence[int], *, requests: int = 4, max_tokens: int = 32) -> Line:
    """torch's own attention, which knows no block table, over both backends: one has to gather for it."""
    limit = longest(model)
    length = limit - max_tokens
    prompts = [[*tokens[37 * i :], *tokens][:length] for i in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    sides = run(
        model,
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        title="torch's own attention",
        attention="torch_sdpa",
        skip_tokenizer_init=True,
        max_num_seqs=requests,
        max_num_batched_tokens=requests * limit,  # all prompts in one step, and then all decode
        max_model_len=limit,
        enable_prefix_caching=False,
        memory_budget=4 * requests * limit * token_bytes(model),
    )
    expected = generate_alone(model, prompts, max_tokens, eos_token_id=None)
    virtual, paged = (sides[kv].decode_speed for kv in SIDES)
    return Line(
        "kernels run as they are",
        f"torch's attention, {requests} x {length:,} tokens: {virtual:,.0f} tokens/s in place, "
        f"{paged:,.0f} over gathered blocks: {virtual / paged:.1f} x",
        all(side.tokens == expected for side in sides.values()),
    )


def growth(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Line, Growth]:
    """One request from a short prompt to the longest context, in one place."""
    limit = longest(model)
    prompt: list[int] = tokenizer(story_prompt())["input_ids"]
    params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False)
    lengths: list[int] = []
    addresses: set[int] = set()

    def watch(side: Side) -> None:
        assert isinstance(side.llm.core.kv, VirtualKV)
        cache = side.llm.core.kv.cache
        running = [slot for slot in cache.page_map() if slot.active]
        lengths.append(running[0].length if running else lengths[-1])
        addresses.add(cache.layer(0)[0].data_ptr())

    sides = run(
        model,
        [{"prompt_token_ids": prompt}],
        params,
        title="one request to the limit",
        watch=watch,
        kinds=("virtual",),
        skip_tokenizer_init=True,
        max_num_seqs=1,
        max_model_len=limit,
        kv_options={"eager_pages": 0},
    )
    side = sides["virtual"]
    mapped = [kv.used_bytes for kv in side.kv[:-1]]
    grown = Growth(lengths[:-1], mapped, side.llm.token_bytes)
    tokens = [*prompt, *side.tokens[0]]
    copied = sum(lengths[:-1]) * grown.token_bytes
    return (
        Line(
            "contexts grow in place",
            f"{len(prompt)} to {len(tokens):,} tokens, the most: {format_bytes(mapped[0])} to "
            f"{format_bytes(mapped[-1])} at {_one(addresses)}; concatenating copies {format_bytes(copied)}",
            _continues(model, tokens, len(prompt)),
        ),
        grown,
    )


def shared(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Line:
    """Eight continuations of one prompt on the same pages."""
    questions = questions_about_the_story()
    prompts: list[list[int]] = [tokenizer(question)["input_ids"] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    most = {"shared": 0, "held": 0, "apart": 0}

    def watch(side: Side) -> None:
        assert isinstance(side.llm.core.kv, VirtualKV)
        cache = side.llm.core.kv.cache
        stats = cache.stats()
        if stats.shared_pages * stats.page_size >= most["shared"]:
            lengths = [slot.length for slot in cache.page_map() if slot.active]
            most["shared"] = stats.shared_pages * stats.page_size
            most["held"] = stats.needed_bytes
            most["apart"] = sum(map(cache.layout.pages, lengths)) * stats.page_size

    sides = run(
        model,
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        title="one prompt, eight ends",
        watch=watch,
        kinds=("virtual",),
        skip_tokenizer_init=True,
        max_num_seqs=len(prompts),
        max_model_len=longest(model),
    )
    expected = generate_alone(model, prompts, 40)
    return Line(
        "prefixes are shared",
        f"{len(prompts)} questions about a story: {format_bytes(most['shared'])} on the same pages; "
        f"{format_bytes(most['held'])} held, {format_bytes(most['apart'])} apart",
        sides["virtual"].tokens == expected,
    )


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of keys and values per token."""
    return shape_of(model.config, "", dtype=str(model.dtype).removeprefix("torch.")).token_bytes


def longest(model: Any) -> int:
    """Tokens of the longest context in the demo."""
    return min(LONGEST, getattr(model.config, "max_position_embeddings", None) or LONGEST)


def _one(addresses: set[int]) -> str:
    return "one address" if len(addresses) == 1 else f"{len(addresses)} addresses"


def _continues(model: Any, tokens: list[int], start: int) -> bool:
    """Whether each token from `start` on is the likeliest after those before it, in one pass of the model."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return bool(torch.equal(logits[start - 1 : -1].argmax(-1), torch.tensor(tokens[start:])))
