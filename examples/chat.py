"""A conversation that keeps its cache: every turn computes its own tokens only.

python examples/chat.py

Before transformers 5.24, `cache=` is `past_key_values=`.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import vattn

MODEL = str(Path(__file__).parents[1] / "demo" / "model")
QUESTIONS = ("What is 17 + 25?", "What is the capital of Norway?", "Count from 3 to 9.")

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
messages: list[dict[str, str]] = []

with vattn.VirtualCache(model) as cache:
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length, cached = inputs["input_ids"].shape[1], cache.get_seq_length()
        output = model.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            cache=cache,
            max_new_tokens=60,
            do_sample=False,
        )
        answer = tokenizer.decode(output[0, length:], skip_special_tokens=True).strip()
        messages.append({"role": "assistant", "content": answer})
        print(f"{question}\n  {answer}\n  {length} tokens of prompt, {cached} of them in the cache")
