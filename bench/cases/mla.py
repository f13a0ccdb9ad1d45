"""Latents in place of keys and values (MLA): bytes per token in published shapes, and the time of attention over them.

Attention of one layer in the shape of DeepSeek-V2-Lite, bf16: over latents, with the projection folded into query and
output (*absorbed*) or with the latents first expanded to keys and values of all heads (*expanded*); and over a cache of
keys and values, as transformers passes them to the attention function (*stored*). All use the engine's `static`
backend, whose memory is allocated from the start, and the kernel that the engine chooses for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.harness import theme
from bench.harness.ratios import Comparison, columns
from bench.harness.records import Record
from bench.harness.report import Goal, Report, Row
from bench.harness.timing import interleave
from vattn import attention
from vattn.attention import AttentionParams, Case, PackedBatch, Span
from vattn.engine.kv.spec import KVSpec
from vattn.engine.kv.static import StaticKV
from vattn.packed import KVShape, LatentAttention, find_latents, kv_shape, register

ABOUT = "latents in place of keys and values: bytes per token, and the time of attention over them"
QUESTION = "What do latents cost and save?"

_DECODES = (512, 2048, 8192)
_CHUNKS = ((64, 2048), (128, 2048), (512, 512), (512, 2048))  # new tokens, tokens with them


@dataclass(frozen=True)
class Shape:
    """The dimensions that decide what a layer stores per token; all of these models have the same latents."""

    name: str
    num_layers: int
    num_heads: int
    rank: int = 512
    rope: int = 64
    nope: int = 128
    v_head_dim: int = 128

    @property
    def latent_bytes(self) -> int:
        return 2 * self.num_layers * (self.rank + self.rope)

    @property
    def expanded_bytes(self) -> int:
        return 2 * self.num_layers * self.num_heads * (self.nope + self.rope + self.v_head_dim)


_SHAPES = (Shape("DeepSeek-V2-Lite", 27, 16), Shape("DeepSeek-V2", 60, 128), Shape("DeepSeek-V3", 61, 128))


def run(quick: bool) -> Report:
    shape = _SHAPES[0]
    latent = _latent_attention(shape)
    decodes, chunks = (_DECODES[:1], _CHUNKS[:1]) if quick else (_DECODES, _CHUNKS)
    cases = [(1, tokens) for tokens in decodes] + list(chunks)
    figures: list[Row] = []
    ratios: dict[tuple[int, int], dict[str, float]] = {}
    taken = []
    for new, tokens in cases:
        seconds = interleave(_actions(latent, shape, new, tokens), 3 if quick or new > 1 else 15, warmup=1)
        times = {name: median(values) * 1e3 for name, values in seconds.items()}
        chosen, other = ("expanded", "absorbed") if new >= latent.expand_from else ("absorbed", "expanded")
        ratios[new, tokens] = {name: time / times[chosen] for name, time in times.items()}
        taken.append(times[other] / times[chosen])
        figures.append(
            {
                "new tokens": new,
                "context": tokens,
                "absorbed ms": times["absorbed"],
                "expanded ms": times["expanded"],
                "stored ms": times["stored"],
                "taken": chosen,
                "other over taken": times[other] / times[chosen],
                "stored over taken": times["stored"] / times[chosen],
            }
        )
    return Report(
        parameters={
            "attention": f"{shape.name}: {shape.num_heads} heads of {shape.nope} + {shape.rope} and {shape.v_head_dim}",
            "dtype": "bfloat16",
            "threads": torch.get_num_threads(),
            **{
                f"{each.name}, bytes per token": f"{each.latent_bytes} as latents, {each.expanded_bytes} expanded: "
                f"{each.expanded_bytes / each.latent_bytes:.1f} x"
                for each in _SHAPES
            },
        },
        figures=figures,
        goals=[
            *(
                Goal(
                    f"bytes per token, expanded over latents, {each.name}",
                    each.expanded_bytes / each.latent_bytes,
                    ">=",
                    least,
                )
                for each, least in zip(_SHAPES, (8.5, 70, 70), strict=True)
            ),
            Goal("the other way over the taken one, least of all", min(taken), ">=", 1),
            *(
                Goal(
                    f"decode over {tokens} tokens, stored keys and values over latents",
                    ratios[1, tokens]["stored"],
                    ">=",
                    1,
                )
                for tokens in decodes
            ),
        ],
    )


def _latent_attention(shape: Shape) -> LatentAttention:
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads, q_lora_rank=None, kv_lora_rank=shape.rank, qk_rope_head_dim=shape.rope,
        qk_nope_head_dim=shape.nope, v_head_dim=shape.v_head_dim, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    register()
    model.train(False).set_attn_implementation("vattn")
    return find_latents(model, kv_shape(model))[0]


def _actions(latent: LatentAttention, shape: Shape, new: int, tokens: int) -> dict[str, Callable[[], Tensor]]:
    """Attention of the last `new` of `tokens` tokens, by what is stored and how it is read."""
    dtype = torch.bfloat16
    batch = PackedBatch((Span(0, tokens - new, tokens),))
    heads, head_dim = shape.num_heads, shape.nope + shape.rope
    query = torch.randn(new, heads, head_dim).to(dtype)
    params = AttentionParams(scale=head_dim**-0.5)
    kernel = attention.get("auto", Case(dtype=dtype))
    everything = PackedBatch((Span(0, 0, tokens),))
    caches = []
    for num_heads, key_dim, value_dim in ((1, shape.rank + shape.rope, 0), (heads, head_dim, shape.v_head_dim)):
        kv = StaticKV(
            KVSpec(
                KVShape.uniform(1, num_heads, key_dim, value_dim), max_num_seqs=1, dtype=dtype, max_model_len=tokens
            ),
            num_slots=1,
        )
        kv.prepare({kv.allocate(tokens): tokens})
        kv.write(0, everything, *(torch.randn(tokens, num_heads, dim).to(dtype) for dim in (key_dim, value_dim)))
        caches.append(kv)
    latents, keys_and_values = caches

    def over_latents(expanded: bool) -> Tensor:
        with torch.inference_mode():
            return latent.attend_as(kernel, query, latents, batch, params, expanded=expanded)

    def over_keys() -> Tensor:
        with torch.inference_mode():
            return kernel(query, keys_and_values, 0, batch, params)

    return {"absorbed": lambda: over_latents(False), "expanded": lambda: over_latents(True), "stored": over_keys}


def compare(record: Record) -> list[Comparison]:
    return [
        Comparison(
            "Attention over stored keys and values takes {} times as long as over latents",
            record,
            columns(record, "stored over taken"),
        )
    ]


def draw(axes: Any, record: Record) -> None:
    rows = record["figures"]
    ways = {
        "absorbed": ("virtual", "over latents"),
        "expanded": ("paged", "over keys and values made from latents"),
        "stored": ("static", "over stored keys and values"),
    }
    for shift, (way, (name, label)) in zip((-0.27, 0, 0.27), ways.items(), strict=True):
        places = [place + shift for place in range(len(rows))]
        axes.bar(places, [row[f"{way} ms"] for row in rows], width=0.26, color=theme.color(name), label=label)
    decodes = [row for row in rows if row["new tokens"] == 1]
    row = decodes[-1] if decodes else rows[0]
    axes.set_title(
        f"{row['new tokens']} new token after {row['context']:,}: {theme.number(row['absorbed ms'])} ms over latents, "
        f"{theme.number(row['expanded ms'])} if they are expanded first"
    )
    axes.set_xticks(range(len(rows)), [f"{row['new tokens']} of\n{row['context']:,}" for row in rows])
    axes.grid(visible=False, axis="x")
    axes.set(yscale="log", xlabel="new tokens of a context", ylabel="milliseconds, one layer")
