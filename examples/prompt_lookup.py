"""Speculative decoding: drafts are looked up in the text, and taken back, at no cost, where the model disagrees.

With a smaller model that has the same tokenizer, `assistant_model=...` does it in place of `prompt_lookup_num_tokens`.

    python examples/prompt_lookup.py

Before transformers 5.24, `cache=` is `past_key_values=`.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import vattn

MODEL = str(Path(__file__).parents[1] / "demo" / "model")

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
prompt = "Question: Write the 12 times table.\nAnswer:"
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
options = {"max_new_tokens": 90, "do_sample": False}

passes = 0


def count(*_: object) -> None:
    global passes
    passes += 1


handle = model.register_forward_hook(count)
with vattn.VirtualCache(model) as cache:
    drafted = model.generate(**inputs, cache=cache, prompt_lookup_num_tokens=6, **options)
    print(tokenizer.decode(drafted[0], skip_special_tokens=True))
    new = drafted.shape[1] - inputs["input_ids"].shape[1]
    print(f"{new} tokens in {passes} forward passes")
    handle.remove()
    cache.reset()
    plain = model.generate(**inputs, cache=cache, **options)
    print("the same tokens as without drafts:", torch.equal(drafted, plain))
