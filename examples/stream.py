"""Text as it is generated, from a thread of its own.

python examples/stream.py
"""

import threading
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import vattn

MODEL = str(Path(__file__).parents[1] / "demo" / "model")

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
inputs = tokenizer("Question: How do you bake bread?\nAnswer:", return_tensors="pt", return_token_type_ids=False)

with vattn.VirtualCache(model) as cache:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = {"cache": cache, "streamer": streamer, "max_new_tokens": 150, "do_sample": False}
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **options})
    thread.start()
    for text in streamer:
        print(text, end="", flush=True)
    thread.join()
    print(f"\n{cache.get_seq_length()} tokens in the cache")
