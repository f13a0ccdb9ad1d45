"""llama.cpp on CPUs, by the C API of llama-cpp-python. Runs under an interpreter that has it, and gguf.

Continuous batching as llama.cpp's own server does it: a batch has the next token of each request that decodes, and then
as much of the prompts as there is room for, both in the order of their slots.

Options: those of `llama_context_params`; `type_k` and `type_v` by their names in GGUF. The model is written as GGUF
beside its own files: matrices as they are, vectors as floats, as llama.cpp's converter does.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np
from protocol import serve  # type: ignore[import-not-found]


def write_gguf(model: Path) -> Path:
    """Writes a Qwen2 model in bfloat16 as `model.gguf` into its own directory. It has no tokenizer."""
    config = json.loads((model / "config.json").read_text())
    file = model / "model.gguf"
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN2])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    # Read here: NumPy has no bfloat16, and safetensors' reader for it needs torch.
    weights = np.memmap(model / "model.safetensors", mode="r")
    begin = 8 + int(weights[:8].view("<u8")[0])
    for name, entry in json.loads(bytes(weights[8:begin])).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, end = (begin + offset for offset in entry["data_offsets"])
        values = weights[first:end].view(np.uint16).reshape(entry["shape"])
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1:
            writer.add_tensor(target, (values.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(target, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class Sequence:
    """A request in a slot: its tokens, and how many of them are computed."""

    def __init__(self, request: dict[str, Any], slot: int) -> None:
        self.slot = slot
        self.tokens: list[int] = list(request["prompt_token_ids"])
        self.end = len(self.tokens) + request["max_tokens"]
        self.computed = 0


class Engine:
    """A model, and a context of llama.cpp. `kv_memory` is what llama.cpp says that its KV cache takes, in MiB."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        said: list[str] = []
        # Kept: llama.cpp calls it for as long as it runs.
        self._log = llama.llama_log_callback(lambda level, text, data: said.append(text.decode()))
        llama.llama_log_set(self._log, None)
        llama.llama_backend_init()
        params = llama.llama_context_default_params()
        for name, value in options.items():
            getattr(params, name)  # ctypes would take any name
            is_type = name in ("type_k", "type_v")
            setattr(params, name, int(gguf.GGMLQuantizationType[value]) if is_type else value)
        file = str(write_gguf(model)).encode()
        loaded = llama.llama_model_load_from_file(file, llama.llama_model_default_params())
        self._context = llama.llama_init_from_model(loaded, params) if loaded else None
        found = re.search(r"llama_kv_cache: size = +([\d.]+) MiB", "".join(said))
        if not self._context or not found:
            raise RuntimeError("".join(said))
        said.clear()
        self.kv_memory = float(found[1])
        self._memory = llama.llama_get_memory(self._context)
        self._slots = llama.llama_n_seq_max(self._context)
        self._rows = llama.llama_n_batch(self._context)
        self._batch = llama.llama_batch_init(self._rows, 0, 1)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))

    def generate(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        """Runs a round, greedily; returns the output tokens of each request."""
        llama.llama_memory_clear(self._memory, False)
        outputs: list[list[int]] = [[] for _ in requests]
        waiting = deque(enumerate(requests))
        running: dict[int, Sequence] = {}
        free = list(range(self._slots))
        while waiting or running:
            while waiting and free:
                number, request = waiting.popleft()
                running[number] = Sequence(request, free.pop(0))
            self._step(list(running.values()))
            for number, sequence in list(running.items()):
                if len(sequence.tokens) == sequence.end:
                    outputs[number] = sequence.tokens[-requests[number]["max_tokens"] :]
                    llama.llama_memory_seq_rm(self._memory, sequence.slot, -1, -1)
                    free.append(running.pop(number).slot)
        return outputs

    def _step(self, running: list[Sequence]) -> None:
        """Computes one batch, and appends a token to each sequence that it completes."""
        batch, count = self._batch, 0
        sampled = []
        for sequence in sorted(running, key=lambda one: (len(one.tokens) - one.computed > 1, one.slot)):
            for token in sequence.tokens[sequence.computed : sequence.computed + self._rows - count]:
                batch.token[count] = token
                batch.pos[count] = sequence.computed
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence.slot
                sequence.computed += 1
                batch.logits[count] = sequence.computed == len(sequence.tokens)
                count += 1
            if sequence.computed == len(sequence.tokens):
                sampled.append(sequence)
        batch.n_tokens = count
        status = llama.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {count} tokens of {len(running)} sequences")
        if sampled:
            logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), (len(sampled), self._vocabulary))
            for sequence, token in zip(sampled, logits.argmax(1).tolist(), strict=True):
                sequence.tokens.append(token)


def load(model: str, options: dict[str, Any]) -> tuple[str, str, Callable[[list[dict[str, Any]]], int]]:
    engine = Engine(Path(model), options)
    version = f"llama-cpp-python {llama.__version__}, KV cache of {engine.kv_memory:g} MiB"
    return "llamacpp", version, lambda requests: sum(len(tokens) for tokens in engine.generate(requests))


if __name__ == "__main__":
    serve(load)
