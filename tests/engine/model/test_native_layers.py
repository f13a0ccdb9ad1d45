"""Decoder layers in one native call: as one by one, over each backend; and where there is none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from tests.support.tiny_models import make_model
from vattn import cpu
from vattn.engine import LLM, SamplingParams
from vattn.engine.model import native_layers
from vattn.engine.model.native_layers import CacheLayers

pytestmark = pytest.mark.skipif(
    cpu.unusable() is not None or not cpu.has_linear(), reason="these kernels have no linear layers"
)

_BACKENDS: dict[str, dict[str, Any]] = {
    "virtual": {"kv": "virtual"},
    "fused": {"kv": "virtual", "kv_options": {"layout": "fused"}},
    "paged": {"kv": "paged"},
    "windows": {"kv": "paged", "block_size": 64, "kv_options": {"windows": True}},
    "static": {"kv": "static"},
}
# Stored in another way.
_OTHERS: dict[str, dict[str, Any]] = {
    "dynamic": {"kv": "dynamic"},
    "int8": {"kv": "virtual", "kv_cache_dtype": "int8"},
    "another kernel": {"kv": "virtual", "attention": "torch_sdpa"},
}


@contextmanager
def _counting() -> Iterator[list[int]]:
    """The number of layers of each native call."""
    calls: list[int] = []
    original = cpu.run_layers

    def run_layers(layers: Any, *args: Any, **keywords: Any) -> Any:
        calls.append(len(layers))
        return original(layers, *args, **keywords)

    with mock.patch.object(cpu, "run_layers", run_layers):
        yield calls


def _model(family: str) -> PreTrainedModel:
    return copy.deepcopy(make_model(family)).bfloat16()


def _generate(model: PreTrainedModel, **options: Any) -> list[tuple[list[int], float]]:
    """Tokens and their probability, of requests that share steps: prompts in chunks beside decodes, and a fork."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, 60, (count,), generator=generator).tolist() for count in (3, 40, 17, 70)]
    params = [
        SamplingParams(seed=number, max_tokens=12, ignore_eos=True, logprobs=0, n=1 + (number == 2))
        for number in range(len(prompts))
    ]
    with LLM(model, max_num_batched_tokens=24, max_num_seqs=8, max_model_len=128, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.core.check()
    return [
        (list(completion.token_ids), completion.cumulative_logprob or 0.0)
        for output in outputs
        for completion in output.outputs
    ]


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral-window"])
def test_as_layers_one_by_one(family: str, backend: str) -> None:
    """Bit by bit."""
    model = _model(family)
    with mock.patch.object(CacheLayers, "parts", return_value=None), _counting() as calls:
        expected = _generate(model, **_BACKENDS[backend])
    assert not calls
    with _counting() as calls:
        assert _generate(model, **_BACKENDS[backend]) == expected
    assert len(calls) > 10
    assert set(calls) == {model.config.num_hidden_layers - 1, model.config.num_hidden_layers}


@pytest.mark.parametrize("other", _OTHERS)
def test_layers_that_are_stored_or_attended_to_in_another_way(other: str) -> None:
    with _counting() as calls:
        assert _generate(_model("qwen2"), **_OTHERS[other])
    assert not calls


def test_layers_with_hooks_are_called() -> None:
    model = _model("qwen2")
    seen: list[torch.Size] = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with _counting() as calls:
        _generate(model, kv="virtual")
    assert not calls
    assert len(seen) > 10


def test_hooks_of_all_modules_are_called() -> None:
    """Those that came after the weights were packed, too."""
    seen: list[str] = []
    model = _model("qwen2")
    prompt, params = [[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(model) as llm:
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        hook = register_module_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
        try:
            with _counting() as calls:
                assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == expected
        finally:
            hook.remove()
    assert not calls
    assert seen.count("Qwen2DecoderLayer") == 4 * model.config.num_hidden_layers


class _Called(Qwen2DecoderLayer):
    """A layer whose call does more than its forward."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return 2 * super().__call__(*args, **keywords)


def test_a_call_that_is_more_than_a_forward() -> None:
    model = _model("qwen2")
    model.model.layers[1].__class__ = _Called
    prompt, params = [[3, 4, 5]], SamplingParams(max_tokens=1, logprobs=3, temperature=0)
    reports = []
    for eager in (True, False):
        with LLM(model, enforce_eager=eager) as llm:
            (report,) = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].logprobs or ()
            reports.append({token: each.logprob for token, each in report.items()})
    assert reports[0] == pytest.approx(reports[1], abs=0.1)


@pytest.mark.parametrize(("most", "expected"), [(1, {1}), (20, {1, 3}), (10**6, {2, 3})])
def test_many_rows_are_several_calls(monkeypatch: pytest.MonkeyPatch, most: int, expected: set[int]) -> None:
    """So that a long step of a large model can be interrupted."""
    model = _model("qwen2")
    with_one = _generate(model, kv="virtual")
    monkeypatch.setattr(native_layers, "_MOST_ROWS", most)
    with _counting() as calls:
        assert _generate(model, kv="virtual") == with_one
    assert set(calls) == expected


def test_layers_up_to_one_with_hooks() -> None:
    model = _model("qwen2")
    expected = _generate(model, kv="virtual")
    seen: list[torch.Size] = []
    model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with _counting() as calls:
        assert _generate(model, kv="virtual") == expected
    assert set(calls) == {1}
    assert len(seen) >= len(calls)  # loading runs the layer, too


def test_what_drafts_store_is_looked_at() -> None:
    """The keys and values of a request that publishes, in the last layer, whose rows are all asked for."""
    model = _model("qwen2")
    prompt = [5, 6, 7, 8] * 6
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with _counting() as calls, LLM(model, speculative_config=drafts, enable_prefix_caching=True) as llm:
        llm.generate([prompt], params, use_tqdm=False)
        assert llm.core.speculation.num_drafts
    assert model.config.num_hidden_layers - 1 in calls
