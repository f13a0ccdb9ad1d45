"""Beam search: what beams have in common is mapped in all of them, and is in memory once.

python examples/beam_search.py

Before transformers 5.24, `cache=` is `past_key_values=`.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import vattn

MODEL = str(Path(__file__).parents[1] / "demo" / "model")
BEAMS = 4
STORY = (
    "Once there was a clever fox named Clara who lived in a den under an old oak. Clara ate berries and eggs and liked "
    "to watch the clouds. At the river the water was high and the bridge was gone. A beaver was looking sadly at the "
    "broken wood. Clara carried one branch after another until the bridge stood again. The beaver crossed it first, "
    "came back, and gave Clara a key. At the mill the great wheel stood still. The miller had searched for the fault "
    "all week. Clara looked between the stones, where nobody had thought of looking, and pulled out a pebble. The "
    "wheel began to turn, and the happy miller gave the fox a drum. In the garden the flowers hung their heads, since "
    "no rain had fallen for a month. Clara found an old well under the ivy and carried water all day long. In the "
    "evening the roses opened. The gardener could hardly believe it, and Clara was given a kite. On the beach the tide "
    "was going out. A young whale lay in the shallow water and could not swim. Clara dug a long ditch in the sand, and "
    "with the next wave the whale slid into the sea. In the ditch something was shining, and Clara picked up a hat. In "
    "the evening Clara was home again with a key, a drum, a kite and a hat, tired and happy. The end."
)

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
prompt = f"Question: Read this story. {STORY} Where did the drum come from?\nAnswer:"
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)

with vattn.VirtualCache(model, page_size=4096) as cache:  # small pages, as a small model's K and V are
    output = model.generate(
        **inputs, cache=cache, num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=20, do_sample=False
    )
    for text in tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True):
        print(text.strip())
    stats = cache.stats()
    print(
        f"{BEAMS} beams of {cache.get_seq_length()} tokens: {stats.owned_bytes / 2**10:.0f} KiB, "
        f"{stats.shared_pages * stats.page_size / 2**10:.0f} KiB of it in several beams"
    )
