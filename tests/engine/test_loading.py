"""What is read from a checkpoint besides its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.paths import ROOT
from vattn.engine import LLM, SamplingParams
from vattn.engine.config import EngineConfig
from vattn.engine.loading import _overrides
from vattn.errors import ConfigError

MODEL = ROOT / "demo" / "model"
OPTIONS: dict[str, Any] = {"max_num_seqs": 2, "memory_budget": "16MiB"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the small model, to change."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_sampling_parameters_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    said = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.25, "max_new_tokens": 5}
    change(checkpoint / "generation_config.json", **said, do_sample=True)
    wanted = SamplingParams(temperature=0.25, top_k=7, top_p=0.5, repetition_penalty=1.25, max_tokens=5)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"min_p": 0.5, "max_new_tokens": 3}))
    for choice, params in (
        ("auto", wanted),
        ("vllm", SamplingParams()),
        (other, SamplingParams(min_p=0.5, max_tokens=3)),
    ):
        with LLM(checkpoint, generation_config=choice, **OPTIONS) as llm:
            assert llm.get_default_sampling_params() == params
            [output] = llm.generate("The river", use_tqdm=False)
            [same] = llm.generate("The river", params.clone(seed=1), use_tqdm=False)
            assert len(output.outputs[0].token_ids) <= (params.max_tokens or 0)
            # What is given is taken as it is: nothing of the checkpoint's is mixed in.
            [plain] = llm.generate("The river", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
            assert len(plain.outputs[0].token_ids) == 9
            assert len(same.outputs[0].token_ids) <= (params.max_tokens or 0)


def test_end_of_sequence_tokens_of_the_generation_config(checkpoint: Path, tmp_path: Path) -> None:
    change(checkpoint / "generation_config.json", eos_token_id=5)
    for name, said in (("other", {"eos_token_id": [6]}), ("silent", {"temperature": 0.5})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps(said))
    for choice, eos in (("auto", 5), ("vllm", 5), (tmp_path / "other", 6), (tmp_path / "silent", 5)):
        with LLM(checkpoint, generation_config=choice, **OPTIONS) as llm:
            assert llm.core.loaded.eos_token_ids == {0, eos}  # 0 is the tokenizer's
            params = SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=[eos])
            completion = llm.generate("The river", params, use_tqdm=False)[0].outputs[0]
        assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([eos], "stop", eos)


def test_a_generation_config_that_cannot_be_read_or_used(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="the generation config '/nowhere' cannot be loaded"):
        LLM(checkpoint, generation_config="/nowhere", **OPTIONS)
    change(checkpoint / "generation_config.json", min_p=3.0)
    with pytest.raises(ConfigError, match=r"min_p is 3\.0.*; give generation_config='vllm'"):
        LLM(checkpoint, **OPTIONS)
    with LLM(checkpoint, generation_config="vllm", **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_fields_of_the_config_can_be_overridden() -> None:
    with LLM(MODEL, hf_overrides={"max_position_embeddings": 77}, **OPTIONS) as llm:
        assert llm.model.config.max_position_embeddings == llm.core.loaded.max_model_len == 77
    with pytest.raises(ConfigError, match="hf_overrides has 'max_positions', which is no field"):
        LLM(MODEL, hf_overrides={"max_positions": 77}, **OPTIONS)
    for overrides in ({"hidden_size": 17}, {"max_position_embeddings": "x"}, {"num_key_value_heads": 0}):
        with pytest.raises(ConfigError, match=r"cannot be loaded with hf_overrides=\{"):
            LLM(MODEL, hf_overrides=overrides, **OPTIONS)


def test_fields_of_a_nested_config_can_be_overridden(tmp_path: Path) -> None:
    transformers.Gemma3Config(text_config={"sliding_window": 512, "hidden_size": 64}).save_pretrained(tmp_path)
    path = str(tmp_path)
    overridden = _overrides(EngineConfig(model=path, hf_overrides={"text_config": {"sliding_window": 77}}), path)
    text = overridden["config"].text_config
    assert (text.sliding_window, text.hidden_size) == (77, 64)
    with pytest.raises(ConfigError, match=r"hf_overrides has 'text_config\.windows', which is no field"):
        LLM(path, hf_overrides={"text_config": {"windows": 77}}, **OPTIONS)


def _overridden(config: transformers.PreTrainedConfig, path: Path, overrides: dict[str, Any]) -> Any:
    config.save_pretrained(path)
    return _overrides(EngineConfig(model=str(path), hf_overrides=overrides), str(path))["config"]


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_parameters_of_rotary_embeddings_that_are_not_overridden_stay(tmp_path: Path, field: str, name: str) -> None:
    """As `rope_theta` and `partial_rotary_factor`, which are fields of their own in many checkpoints."""
    overridden = _overridden(transformers.GlmConfig(), tmp_path, {field: {name: "linear", "factor": 2.0}})
    linear = {"rope_type": "linear", "factor": 2.0}
    assert overridden.rope_parameters == {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, **linear}


def test_rotary_embeddings_of_each_layer_type_can_be_overridden(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig()
    full = {"rope_type": "linear", "factor": 8.0}
    overridden = _overridden(config, tmp_path, {"rope_parameters": {"full_attention": full}})
    before = config.rope_parameters
    assert overridden.rope_parameters == {**before, "full_attention": {**before["full_attention"], **full}}
    with pytest.raises(ConfigError, match=r"hf_overrides has 'rope_parameters\.rope_type', which is no field"):
        _overridden(config, tmp_path, {"rope_parameters": full})
    with pytest.raises(ConfigError, match=r"hf_overrides has 'rope_parameters\.full_attention', which is no field"):
        _overridden(transformers.Qwen3Config(), tmp_path, {"rope_parameters": {"full_attention": full}})


def test_a_longer_context_by_an_override() -> None:
    """YaRN: its limit is what the config says, as transformers and vLLM read it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    with LLM(MODEL, hf_overrides={"rope_parameters": yarn, "max_position_embeddings": 8192}, **OPTIONS) as llm:
        assert llm.core.loaded.max_model_len == 8192
        assert llm.model.model.rotary_emb.rope_type == "yarn"
        llm.generate("The river", SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ConfigError, match=r"cannot be loaded with hf_overrides=.*Missing required keys.*'factor'"):
        LLM(MODEL, hf_overrides={"rope_parameters": {"rope_type": "yarn"}}, **OPTIONS)


def test_a_module_that_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a path, a hub id, or a loaded causal language model"):
        LLM(torch.nn.Linear(2, 2), **OPTIONS)  # type: ignore[arg-type]


def test_the_revision_reaches_whatever_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        real = getattr(transformers, name).from_pretrained

        def note(path: str, name: str = name, real: Any = real, **keywords: Any) -> Any:
            seen[name] = keywords.get("revision")
            return real(path, **keywords)

        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", note)
    with LLM(MODEL, revision="v1.5", hf_overrides={"use_cache": True}, **OPTIONS):
        assert seen == dict.fromkeys(seen, "v1.5")
        assert len(seen) == 3
