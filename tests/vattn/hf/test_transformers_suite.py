"""The script that runs transformers' own tests with VirtualCaches, over a stand-in for those tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import SECONDS

SCRIPT = Path(__file__).with_name("transformers_suite.py")
TESTS = """
import torch, transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MambaConfig

CONFIG = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
              pad_token_id=0, eos_token_id=None)

def test_generate():
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    ids = torch.ones(1, 3, dtype=torch.int64)
    output = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    (cache,) = (output[name] for name in ("cache", "past_key_values") if name in output)
    assert cache.get_seq_length() == 6
    assert isinstance(cache, DynamicCache)

def test_cache_of_a_model_that_is_refused():
    assert DynamicCache(config=MambaConfig(num_hidden_layers=2)).layers

def test_generate_fails_either_way():
    raise AssertionError

def test_cache_gradients():
    cache = DynamicCache(config=LlamaConfig(**CONFIG))
    rows = torch.ones(1, 2, 3, 8, requires_grad=True)
    for _ in range(2):
        keys, values = cache.update(rows, rows, 0)
    keys.sum().backward()
    torch.testing.assert_close(rows.grad, torch.full_like(rows, 2))

def test_cache_is_no_other():
    assert not hasattr(DynamicCache(config=LlamaConfig(**CONFIG)), "trim")

def test_not_selected():
    raise AssertionError
"""


def run(tests: Path, *families: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--tests", str(tests), "--json", str(tests / "found.json"), *families]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def checkout(folder: Path, text: str) -> Path:
    (folder / "tests" / "models" / "llama").mkdir(parents=True)
    (folder / "tests" / "models" / "llama" / "test_modeling_llama.py").write_text(text)
    return folder / "tests"


@pytest.mark.long
def test_what_fails_only_with_a_virtual_cache_is_reported_by_reason(tmp_path: Path) -> None:
    tests = checkout(tmp_path, TESTS)
    done = run(tests, "llama")
    assert "3 failed, 2 passed with a VirtualCache" in done.stdout, done.stdout + done.stderr
    assert "3 VirtualCaches were made, 1 DynamicCaches" in done.stdout
    assert "2 fail that pass with a DynamicCache" in done.stdout
    assert "1 x gradients through earlier forward passes" in done.stdout
    assert "1 x NEW" in done.stdout
    assert done.returncode == 1
    assert len(json.loads((tests / "found.json").read_text())["virtual"]["outcomes"]) == 5


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    assert "takes the tests folder of a checkout" in run(tmp_path).stderr
    assert "no tests of gpt2" in run(checkout(tmp_path, TESTS), "gpt2").stderr
