"""Keys and values in 8 bits (`kv_cache_dtype="int8"`) beside the model's type: bytes, error, and the time of a step.

The error is measured on the demo's model in float32, over the demo's prompts and the model's answers, and on a random
model in bfloat16, over random tokens. Every token is predicted from the same preceding text, in chunks much shorter
than the text: this compares what was read from the cache, not the consequences of a first difference. The share of
greedy tokens does include those: answers generated both ways are compared token by token, up to the end of the
shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.harness import theme
from bench.harness.decode_loop import DecodeLoop
from bench.harness.models import qwen2
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from demo.prompts import prompts
from vattn import packed
from vattn.engine import LLM, SamplingParams
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.spec import KVSpec
from vattn.quantised import KVCacheDtype

ABOUT = "keys and values in 8 bits: bytes per token, error of logits and tokens, time of a decode step"
QUESTION = "What do 8-bit keys and values cost and save?"

_DEMO = str(Path(__file__).parents[2] / "demo" / "model")
_RANDOM = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
}
_CONTEXTS = (256, 1024, 1900)  # the demo's model ends at 2048
_BATCH = 8
_KINDS: tuple[KVCacheDtype, ...] = ("auto", "int8")


@dataclass(frozen=True)
class _Case:
    name: str
    model: str | PreTrainedModel
    texts: list[list[int]] | None  # None: the demo's prompts, and the answers
    num_texts: int
    answer: int  # most tokens of an answer


def run(quick: bool) -> Report:
    generator = torch.Generator().manual_seed(0)
    random = qwen2(**(_RANDOM | ({"num_hidden_layers": 1} if quick else {})))
    texts = [torch.randint(1, 8192, (300,), generator=generator).tolist() for _ in range(4)]
    cases = [
        _Case("demo, float32", _DEMO, None, 2 if quick else 24, 20 if quick else 300),
        _Case("random, bfloat16", random, texts, 1 if quick else 4, 8 if quick else 64),
    ]
    figures: list[Row] = []
    errors: dict[str, dict[str, float]] = {}
    for case in cases:
        error = errors[case.name] = _error(case)
        for context in _CONTEXTS[:1] if quick else _CONTEXTS:
            times = _step_times(case.model, context, rounds=3 if quick else 15)
            figures.append(
                {
                    "model": case.name,
                    "float B/token": error["auto bytes"],
                    "int8 B/token": error["int8 bytes"],
                    "logits off, of std": error["difference"],
                    "same top token %": 100 * error["same"],
                    "same greedy tokens %": 100 * error["greedy"],
                    "context": context,
                    "float step ms": times["auto"] * 1e3,
                    "int8 step ms": times["int8"] * 1e3,
                    "step ratio": times["int8"] / times["auto"],
                }
            )
    demo, other = (errors[case.name] for case in cases)
    return Report(
        parameters={"batch": _BATCH, "random model": str(_RANDOM), "threads": torch.get_num_threads()},
        figures=figures,
        goals=[
            Goal("int8 over float bytes per token, demo, float32", demo["int8 bytes"] / demo["auto bytes"], "<=", 0.35),
            Goal(
                "int8 over float bytes per token, random, bfloat16",
                other["int8 bytes"] / other["auto bytes"],
                "<=",
                0.6,
            ),
            Goal("mean difference of logits over their standard deviation, demo", demo["difference"], "<=", 0.01),
            Goal("share of tokens with the same top token, demo", demo["same"], ">=", 0.99),
            Goal("share of greedy tokens that are the same, demo", demo["greedy"], ">=", 0.95),
        ],
    )


def _error(case: _Case) -> dict[str, float]:
    """Bytes per token by kind of cache, and the error of int8 against the model's type."""
    answers: dict[str, list[list[int]]] = {}
    logits: dict[str, Tensor] = {}
    found: dict[str, float] = {}
    greedy = SamplingParams(temperature=0, max_tokens=case.answer)
    asked: Any = (case.texts or prompts())[: case.num_texts]
    texts = case.texts and asked
    for kind in _KINDS:
        with LLM(case.model, kv_cache_dtype=kind, enforce_eager=True) as llm:
            outputs = llm.generate(asked, greedy, use_tqdm=False)
            answers[kind] = [list(output.outputs[0].token_ids) for output in outputs]
            found[f"{kind} bytes"] = llm.token_bytes
        if texts is None:
            texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
        logits[kind] = _logits(case.model, kind, texts)
    pairs = [p for own, other in zip(*answers.values(), strict=True) for p in zip(own, other, strict=False)]
    return found | {
        "difference": float((logits["int8"] - logits["auto"]).abs().mean() / logits["auto"].std()),
        "same": float((logits["int8"].argmax(-1) == logits["auto"].argmax(-1)).float().mean()),
        "greedy": sum(own == other for own, other in pairs) / len(pairs),
    }


def _logits(model: str | PreTrainedModel, kind: KVCacheDtype, texts: list[list[int]]) -> Tensor:
    """`[tokens, vocab_size]`: the predictions of all tokens of the texts but the first of each."""
    seen: list[Tensor] = []
    with LLM(model, kv_cache_dtype=kind, enforce_eager=True, max_num_seqs=1, max_num_batched_tokens=32) as llm:
        run = llm.core.runner.run

        def note(entries: Any) -> Any:
            forward = run(entries)
            seen.append(forward.prompt_logits.float())
            return forward

        llm.core.runner.run = note  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    return torch.cat(seen)


def _step_times(model: str | PreTrainedModel, context: int, *, rounds: int) -> dict[str, float]:
    """Seconds of a decode step of the whole model, by kind of cache."""
    with LLM(model, enforce_eager=True) as llm:
        loaded = llm.model
    packed.register()
    loaded.set_attn_implementation(packed.NAME)
    shape = packed.kv_shape(loaded)
    longest = context + rounds + 8
    loops = {
        kind: DecodeLoop(
            loaded,
            make_backend(
                "virtual",
                KVSpec(
                    shape,
                    dtype=loaded.dtype,
                    device=loaded.device,
                    max_num_seqs=_BATCH,
                    max_model_len=longest,
                    memory_budget="4GiB",
                ),
                kv_cache_dtype=kind,
            ),
            batch=_BATCH,
            length=context,
            max_length=longest,
        )
        for kind in _KINDS
    }
    times = interleave({kind: loop.step for kind, loop in loops.items()}, rounds)
    return {kind: median(values) for kind, values in times.items()}


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "Keys and values in the model's type take {} times the bytes of 8-bit ones",
            record,
            columns(record, "float B/token", "int8 B/token"),
        ),
        Comparison(
            "A step over the model's type takes {} times as long as over 8-bit values",
            record,
            columns(record, "float step ms", "int8 step ms"),
        ),
    ]


def draw(axes: Any, record: Record) -> None:
    models = list(dict.fromkeys(row["model"] for row in record["figures"]))
    for model, name in zip(models, ("virtual", "paged"), strict=False):
        rows = [row for row in record["figures"] if row["model"] == model]
        axes.plot(
            [row["context"] for row in rows], [row["step ratio"] for row in rows], **theme.style(name), label=model
        )
    theme.reference(axes, "the model's own type")
    last = record["figures"][-1]
    axes.set_title(
        f"8-bit codes take {100 * last['int8 B/token'] / last['float B/token']:.0f} % of the memory; a decode step "
        f"takes {theme.more_time(last['step ratio'])}"
    )
    axes.set(xlabel="tokens per request", ylabel="time of a step, over the model's type", ylim=(0, None))
    theme.doublings(axes, sorted({row["context"] for row in record["figures"]}))
