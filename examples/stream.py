"""Text as it is generated, from a thread of its own.

python examples/stream.py

Before transformers 5.24, `cache=` is `past_key_values=`.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import vattn

MODEL = str(Path(__file__).parents[1] / "demo" / "model")

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
inputs = tokenizer("Question: How do you bake bread?\nAnswer:", return_tensors="pt", return_token_type_ids=False)

with vattn.VirtualCache(model) as cache, ThreadPoolExecutor(1) as thread:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    generated = thread.submit(
        model.generate, **inputs, cache=cache, streamer=streamer, max_new_tokens=150, do_sample=False
    )
    generated.add_done_callback(lambda _: streamer.end())  # or the loop would wait forever after an error
    for text in streamer:
        print(text, end="", flush=True)
    generated.result()  # raises that error
    print(f"\n{cache.get_seq_length()} tokens in the cache")
