"""A batch of prompts of different lengths through transformers' generate(), with a cache that takes what they need.

python examples/generate.py

Before transformers 5.24, `cache=` is `past_key_values=`.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import vattn

MODEL = str(Path(__file__).parents[1] / "demo" / "model")
QUESTIONS = ("What is 17 + 25?", "Name 4 planets.", "Write the 12 times table.")

tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(MODEL)
prompts = [f"Question: {question}\nAnswer:" for question in QUESTIONS]
inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)

with vattn.VirtualCache(model, max_context_len=131_072) as cache:
    output = model.generate(**inputs, cache=cache, max_new_tokens=120, do_sample=False)
    for text in tokenizer.batch_decode(output, skip_special_tokens=True):
        print(text, end="\n\n")
    stats = cache.stats()
    print(
        f"{stats.live_tokens} tokens, padding included: {stats.live_bytes / 2**20:.1f} MiB of K and V in "
        f"{stats.owned_bytes / 2**20:.1f} MiB of memory; {stats.reserved_bytes / 2**30:.1f} GiB of address space"
    )
