"""Trains the demo model: `python -m demo.train_model --out demo/model`.

A Llama-shaped model of about 1.2 million parameters and a byte-level BPE tokenizer, both made from
the text of `demo.corpus` and saved in transformers format with a model card that states what the
trained weights did in an exam.

What is guaranteed: the corpus and the tokenizer depend on the seed alone; the weights, on one kind
of CPU with one torch version and one number of threads, are the same to the bit. Elsewhere the order
of floating-point sums differs, so the weights do too, and only the figures of the exam are alike.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from torch.nn.functional import cross_entropy
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import END, KINDS, Conversation, conversations, exam, prompt

PAD = "<|pad|>"
STEP_TOKENS = 4096  # per optimizer step
MAX_PADDING = 250  # tokens per forward pass: to start another pass costs about as much
MAX_TOKENS = 768  # longer conversations are left out of training
EXAM_QUESTIONS = 40  # of each kind, where there are as many
ANSWER_LIMIT = 600  # tokens; an answer that long in the exam has failed to stop

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content + '\n' }}
{%- elif message.role == 'user' -%}{{ 'Question: ' + message.content + '\n' }}
{%- elif message.role == 'assistant' -%}{{ 'Answer: ' + message.content + eos_token + '\n' }}
{%- else -%}{{ raise_exception('unknown role: ' + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Answer:' }}{%- endif -%}
"""


@dataclass(frozen=True)
class Example:
    """One conversation as tokens; `weights` says how much each token matters as a prediction.

    A question's tokens weigh nothing, and an answer of n tokens sqrt(n), or long answers would
    drown the short ones. To end in the right place weighs most of all: see `encode`.
    """

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Mark:
    """How the model answered the exam in one kind of question."""

    kind: str
    asked: int
    right: int
    stopped: int
    prompt_tokens: list[int]
    answer_tokens: list[int]
    question: str  # the first one
    answer: str  # what the model said to it


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=Path("demo/model"), help="folder to write")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus and of the weights")
    parser.add_argument("--threads", type=int, default=2, help="part of what the weights depend on")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(args.threads)

    tokenizer = build_tokenizer(args.seed)
    model = build_model(tokenizer)
    start = time.monotonic()
    train(model, tokenizer, args.steps, args.seed)
    minutes = (time.monotonic() - start) / 60

    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    marks = examine(model, tokenizer, args.seed)
    made = (
        f"`python -m demo.train_model --steps {args.steps} --seed {args.seed}` "
        f"({STEP_TOKENS} tokens a step) in {minutes:.0f} minutes on {args.threads} threads "
        f"({platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__})"
    )
    card = model_card(model, marks, made)
    (args.out / "README.md").write_text(card)
    print(card)


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over words and pairs of digits: to stop a count at 60 is to meet the one token 60 again."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.Regex(r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+")
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(words, "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1536,
        special_tokens=[END, PAD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = itertools.islice(conversations(seed), 5000)
    texts = (prompt(q, c.system) + f" {a}" for c in sample for q, a in c.turns)
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Llama's shape in small. A token's keys and values take 2.5 KiB of cache in float32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Example:
    ids: list[int] = []
    weights: list[float] = []
    opening, system = "", conversation.system
    for question, answer in conversation.turns:
        asked = tokenizer.encode(opening + prompt(question, system))
        learned = tokenizer.encode(f" {answer}{END}")
        ids += asked + learned
        weights += [0.0] * len(asked) + [len(learned) ** -0.5] * (len(learned) - 2) + [1.0, 1.0]
        opening, system = "\n", ""
    return Example(ids, weights)


def steps_of(examples: Iterator[Example]) -> Iterator[list[list[Example]]]:
    """Endless optimizer steps, each cut into micro-batches of rows of similar length.

    Rows of similar length need little padding, and unlike packed rows no attention mask: a short
    question never pays for the context of a story.
    """
    while True:
        rows: list[Example] = []
        while sum(len(row.ids) for row in rows) < STEP_TOKENS:
            row = next(examples)
            if len(row.ids) <= MAX_TOKENS:
                rows.append(row)
        rows.sort(key=lambda row: -len(row.ids))
        batches: list[list[Example]] = []
        padding = MAX_PADDING
        for row in rows:
            padding += len(batches[-1][0].ids) - len(row.ids) if batches else 0
            if padding >= MAX_PADDING:
                batches.append([])
                padding = 0
            batches[-1].append(row)
        yield batches


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Muon for the matrices, which learns about twice as fast as Adam here; AdamW for the rest."""
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    outer = [p for p in model.parameters() if not any(p is q for q in inner)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2,
        )
        for optimizer in optimizers
    ]
    examples = (encode(tokenizer, conversation) for conversation in conversations(seed))
    progress = tqdm(itertools.islice(steps_of(examples), steps), total=steps, unit="step")
    model.train()
    for batches in progress:
        scale = sum(weight for batch in batches for row in batch for weight in row.weights)
        total = 0.0
        for batch in batches:
            ids = _padded([row.ids for row in batch], torch.long)
            weights = _padded([row.weights for row in batch], torch.float32)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            loss = (losses * weights[:, 1:].flatten()).sum() / scale
            loss.backward()
            total += loss.item()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        progress.set_postfix(loss=f"{total:.3f}")
    model.train(False)


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """Rows of numbers as one tensor, with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def examine(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Mark]:
    """Greedy answers by transformers' own `generate` to questions of every kind."""
    marks = []
    for kind in tqdm(KINDS, unit="kind", desc="exam"):
        pairs = exam(kind, EXAM_QUESTIONS, seed)
        batch = tokenizer([prompt(question) for question, _ in pairs], padding=True)
        prompts = torch.tensor(batch["input_ids"])
        output = model.generate(  # type: ignore[misc, unused-ignore]  # transformers types it from 5.24 on
            prompts,
            attention_mask=torch.tensor(batch["attention_mask"]),
            max_new_tokens=ANSWER_LIMIT,
            do_sample=False,
        )
        given = [[t for t in row if t != model.config.pad_token_id] for row in output[:, prompts.shape[1] :].tolist()]
        texts = [text.strip() for text in tokenizer.batch_decode(given, skip_special_tokens=True)]
        marks.append(
            Mark(
                kind=kind,
                asked=len(pairs),
                right=sum(text == answer for text, (_, answer) in zip(texts, pairs, strict=True)),
                stopped=sum(row[-1] == tokenizer.eos_token_id for row in given),
                prompt_tokens=[sum(row) for row in batch["attention_mask"]],
                answer_tokens=[len(row) for row in given],
                question=pairs[0][0],
                answer=texts[0],
            )
        )
    return marks


def model_card(model: LlamaForCausalLM, marks: Sequence[Mark], made: str) -> str:
    """The README of the model: nothing in it is typed that could be measured."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    asked, right, stopped = (sum(getattr(mark, field) for mark in marks) for field in ("asked", "right", "stopped"))
    rows = "\n".join(
        f"| {mark.kind} | {'held out' if KINDS[mark.kind].open else 'seen'} "
        f"| {mark.right} / {mark.asked} | {mark.stopped} / {mark.asked} "
        f"| {_range(mark.prompt_tokens)} | {_range(mark.answer_tokens)} |"
        for mark in marks
    )
    samples = "\n".join(
        f"- **{mark.question[:150]}** {mark.answer[:150]} ({mark.answer_tokens[0]} tokens)" for mark in marks
    )
    return f"""\
# The demo model

A causal language model for trying out KV caches. It answers a few kinds of simple questions, with
answers of very different lengths, and ends each of them with its eos token. It knows nothing else.

- Shape: `{config.model_type}`, {config.num_hidden_layers} layers of hidden size {config.hidden_size}, \
{config.num_attention_heads} query heads on {config.num_key_value_heads} KV heads of {config.head_dim}, \
{parameters:,} parameters in {str(model.dtype).removeprefix("torch.")}.
- Tokenizer: byte-level BPE of {config.vocab_size} entries; numbers are read two digits at a time. Eos (and bos, which \
nothing adds by itself) is `{END}`.
- Context: {config.max_position_embeddings} positions, trained on up to {MAX_TOKENS}.
- Text: made by `demo.corpus`; greedy decoding is meant.
- Made by {made}.

The prompt is plain text, and the chat template of the tokenizer writes the same:

    {prompt("What is 17 + 25?").replace(chr(10), chr(10) + "    ")}

## Exam

Written by `demo.train_model` from the weights beside it. An answer is right when every character is.
Held out: training never showed these answers. Seen: the kind has few
questions, and training showed them all. In all {right} of {asked} are right, and {stopped} stopped by
themselves within {ANSWER_LIMIT} tokens.

| kind | questions | right | stopped | prompt tokens | answer tokens |
| --- | --- | --- | --- | --- | --- |
{rows}

The first question of each kind, and what the model said (cut to 150 characters):

{samples}
"""


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"


if __name__ == "__main__":
    main()
