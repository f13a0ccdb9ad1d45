"""An engine that finds prefixes on disk computes what one without them computes."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from tests.support import scripts
from tests.support.backends import CACHING_KVS, PAGED_WINDOWS, chosen
from tests.support.effort import covering
from tests.support.tiny_models import FAMILIES, expected, make_model, make_prompts
from tests.support.waiting import wait_until
from vattn.engine import LLM, AsyncEngine, RequestOutput, SamplingParams
from vattn.engine.kv.rows import Rows
from vattn.engine.kv.virtual import VirtualKV
from vattn.engine.model.fingerprint import fingerprint
from vattn.engine.model.optimize import supported
from vattn.engine.requests.request import FinishReason
from vattn.engine.scheduling import stored
from vattn.engine.server.prometheus import Exporter
from vattn.errors import ConfigError, OutOfPages
from vattn.store import background, folder
from vattn.store.folder import PrefixStore

pytestmark = pytest.mark.slow(1)

MAX_TOKENS = 10
BLOCK = 16
PROMPT = make_prompts([100], seed=8)[0]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "BLOCK_TOKENS", BLOCK)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def make_llm(model: PreTrainedModel, path: Path, kv: str = "virtual", **options: Any) -> LLM:
    pages = {"kv_options": {"page_size": 4096, "layout": "fused"}} if kv == "virtual" else {}
    defaults = {"skip_tokenizer_init": True, "max_model_len": 200, "max_num_seqs": 4, "kv_store": path}
    return LLM(model, **chosen(kv, **{**defaults, **pages, **options}))


def run(llm: LLM, *prompts: Any, sampling: SamplingParams = GREEDY) -> list[RequestOutput]:
    """What is said to each prompt; afterwards all of it is on disk."""
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    llm.check()
    assert llm.core.stored is not None
    llm.core.stored.flush()
    return outputs


def once(path: Path, *prompts: Any, model: PreTrainedModel | None = None, **options: Any) -> list[int]:
    """The cached tokens of each prompt in an engine of its own."""
    with make_llm(make_model("llama") if model is None else model, path, **options) as llm:
        return [output.num_cached_tokens for output in run(llm, *prompts)]


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@pytest.mark.parametrize(("family", "kv"), covering(list(FAMILIES), CACHING_KVS))
def test_a_restarted_engine_says_the_same_and_computes_no_prefix(family: str, kv: str, path: Path) -> None:
    """Also beside others, in chunks that do not end with blocks, and after the output of the engine before."""
    options: dict[str, Any] = {"max_num_batched_tokens": 40}
    if kv == PAGED_WINDOWS and family.startswith("deepseek"):
        options["block_size"] = 128
    prompts = [PROMPT, [*PROMPT[:50], 3, 4, 5]]
    with make_llm(make_model(family), path, kv, **options) as llm:
        first = run(llm, *prompts)
        windowed = any(window is not None for window in llm.core.stored._windows)  # type: ignore[union-attr]
    later = [*prompts, PROMPT + first[0].outputs[0].token_ids + [7, 8]]
    with make_llm(make_model(family), path, kv, **options) as llm:
        (again,) = run(llm, PROMPT)
        others = run(llm, *later)
        assert llm.core.stored is not None
        assert (llm.core.stored.errors, llm.core.stored.dropped) == (0, 0)
        assert llm.core.stored.hit_tokens >= again.num_cached_tokens
    for prompt, output in zip([PROMPT, *later], [again, *others], strict=True):
        assert output.outputs[0].token_ids == expected(family, prompt, MAX_TOKENS, output.outputs[0].token_ids)
    assert again.outputs[0].token_ids == first[0].outputs[0].token_ids
    if not windowed:  # rows that a window has given back are not stored, nor what follows them
        assert again.num_cached_tokens == whole(len(PROMPT) - 1)
        assert others[2].num_cached_tokens >= whole(len(PROMPT) + MAX_TOKENS - 1)


@pytest.mark.parametrize("family", ["qwen2-window", "gemma2"])
def test_layers_with_a_window_have_their_rows(family: str, path: Path) -> None:
    for cached in (0, whole(len(PROMPT) - 1)):
        with make_llm(make_model(family), path, max_num_batched_tokens=2 * BLOCK) as llm:
            (output,) = run(llm, PROMPT)
        assert output.outputs[0].token_ids == expected(family, PROMPT, MAX_TOKENS)
        assert output.num_cached_tokens == cached


@pytest.mark.parametrize("family", ["qwen2-window", "gemma2"])
def test_rows_that_a_window_gave_back_are_not_stored(family: str, path: Path) -> None:
    long = SamplingParams(temperature=0, max_tokens=60)
    with make_llm(make_model(family), path) as llm:
        (first,) = run(llm, PROMPT, sampling=long)
    later = PROMPT + first.outputs[0].token_ids
    with make_llm(make_model(family), path) as llm:
        (output,) = run(llm, later)
    assert output.num_cached_tokens == whole(len(PROMPT))
    assert output.outputs[0].token_ids == expected(family, later, MAX_TOKENS)


def test_a_block_of_which_memory_has_a_part_is_completed(path: Path) -> None:
    once(path, PROMPT, kv="paged", block_size=8)
    with make_llm(make_model("llama"), path, "paged", block_size=8) as llm:
        run(llm, [*PROMPT[: 2 * BLOCK + 9], *make_prompts([5], seed=13)[0]])
        assert llm.core.kv.find(PROMPT) == 2 * BLOCK + 8
        (output,) = run(llm, PROMPT)
    assert output.num_cached_tokens == whole(len(PROMPT) - 1)
    assert output.outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)


def test_codes_of_8_bits_come_back_as_they_were(path: Path) -> None:
    said = []
    for cached in (0, whole(len(PROMPT) - 1)):
        with make_llm(make_model("llama"), path, kv_cache_dtype="int8") as llm:
            (output,) = run(llm, PROMPT)
        assert output.num_cached_tokens == cached
        said.append(output.outputs[0].token_ids)
    assert said[0] == said[1]


@pytest.mark.parametrize(("one", "other"), [("virtual", "paged"), ("paged", "virtual")])
def test_a_backend_finds_what_another_stored(one: str, other: str, path: Path) -> None:
    with make_llm(make_model("llama"), path, one, attention="torch_sdpa", block_size=128) as llm:
        run(llm, PROMPT)
    with make_llm(make_model("llama"), path, other, attention="torch_sdpa", block_size=128) as llm:
        (output,) = run(llm, PROMPT)
    assert output.num_cached_tokens == whole(len(PROMPT) - 1)
    assert output.outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)


def test_what_memory_lost_is_read_again(path: Path) -> None:
    with make_llm(make_model("llama"), path) as llm:
        run(llm, PROMPT)
        llm.core.kv.evict_prefixes()
        outputs = run(llm, PROMPT, [*PROMPT[:-1], 1])
        counts = llm.core.scheduler.hit_tokens, llm.core.stored.hit_tokens  # type: ignore[union-attr]
    assert [output.num_cached_tokens for output in outputs] == [whole(len(PROMPT) - 1)] * 2
    assert sum(counts) == 2 * whole(len(PROMPT) - 1)
    assert counts[1] >= whole(len(PROMPT) - 1)


def test_only_blocks_that_memory_lacks_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once(path, PROMPT)
    read: list[int] = []
    real = PrefixStore.read
    monkeypatch.setattr(
        PrefixStore, "read", lambda self, block, allocate: read.append(block.depth) or real(self, block, allocate)
    )
    with make_llm(make_model("llama"), path) as llm:
        run(llm, PROMPT)
        assert read == list(range(whole(len(PROMPT) - 1) // BLOCK))
        found = llm.core.kv.find(PROMPT)
        assert found >= 2 * BLOCK
        read.clear()
        run(llm, PROMPT)
    assert read == list(range(found // BLOCK, whole(len(PROMPT) - 1) // BLOCK))


def test_no_block_is_written_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = PrefixStore.put

    def put(self: PrefixStore, block: Any, parts: Any, **when: Any) -> bool:
        written.append(block.key)
        return real(self, block, parts, **when)

    monkeypatch.setattr(PrefixStore, "put", put)
    once(path, PROMPT, PROMPT, [*PROMPT, 1, 2])
    once(path, PROMPT, [*PROMPT, 5])
    assert len(written) == len(set(written)) >= len(PROMPT) // BLOCK


# Who finds what


def test_salts_keep_tenants_apart(path: Path) -> None:
    def of(tenant: str) -> dict[str, Any]:
        return {"prompt_token_ids": PROMPT, "cache_salt": tenant}

    assert once(path, of("1")) == [0]
    assert once(path, of("2")) == [0]
    assert once(path, PROMPT) == [0]
    assert once(path, of("2")) == once(path, of("1")) == once(path, PROMPT) == [whole(len(PROMPT) - 1)]


def test_what_is_kept_to_itself_is_not_stored(path: Path) -> None:
    with make_llm(make_model("llama"), path) as llm:
        run(llm, PROMPT, sampling=SamplingParams(temperature=0, max_tokens=MAX_TOKENS, prompt_logprobs=1))
        assert PrefixStore(path).entries() == []


def test_other_weights_types_and_settings_find_nothing(path: Path) -> None:
    def changed() -> Iterator[tuple[PreTrainedModel, dict[str, Any]]]:
        model = copy.deepcopy(make_model("llama"))
        with torch.no_grad():
            model.get_output_embeddings().weight[3, 5] += 1e-3
        yield model, {}
        model = copy.deepcopy(make_model("llama"))
        model.model.rotary_emb.inv_freq[1] *= 1.01
        yield model, {}
        model = copy.deepcopy(make_model("llama"))
        model.config.rms_norm_eps *= 2
        yield model, {}
        yield copy.deepcopy(make_model("llama")).to(torch.bfloat16), {}
        yield make_model("llama"), {"kv_cache_dtype": "int8"}
        yield make_model("llama"), {"attention": "torch_sdpa"}
        yield make_model("llama"), {"enforce_eager": True}

    once(path, PROMPT)
    for model, options in changed():
        assert once(path, PROMPT, model=model, **options) == [0]
    assert once(path, PROMPT, model=copy.deepcopy(make_model("llama"))) == [whole(len(PROMPT) - 1)]


def test_a_model_that_was_saved_and_loaded_has_the_same_fingerprint(tmp_path: Path) -> None:
    model = copy.deepcopy(make_model("llama"))
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    assert fingerprint(model) == before
    assert fingerprint(type(model).from_pretrained(tmp_path)) == before


def _forward_hook(*_: object) -> None:
    pass


@pytest.mark.parametrize("how", ["hook", "pre-hook", "hook of all modules", "forward"])
def test_a_model_that_computes_more_than_it_shows_is_refused(how: str, path: Path) -> None:
    """Hooks and forwards may change keys and values, and no hash shows them."""
    model = copy.deepcopy(make_model("llama"))
    layer = model.model.layers[1]
    which, removed = r"model.layers.1 \(LlamaDecoderLayer\) has a hook", None
    if how == "forward":
        which, layer.forward = r"model.layers.1 \(LlamaDecoderLayer\) has a forward of its own", layer.forward
    elif how == "hook of all modules":
        which, removed = "every module has a hook", register_module_forward_hook(_forward_hook)
    else:
        register = layer.register_forward_hook if how == "hook" else layer.register_forward_pre_hook
        removed = register(_forward_hook)
    try:
        with pytest.raises(ConfigError, match=f"{which}; remove it, or leave both options out"):
            make_llm(model, path)
        with LLM(model, skip_tokenizer_init=True, max_model_len=200, max_num_seqs=4) as llm:
            llm.generate([PROMPT], GREEDY, use_tqdm=False)
    finally:
        if removed is not None:
            removed.remove()
    if removed is not None:
        assert once(path, PROMPT, model=model) == [0]


def test_hooks_of_transformers_are_no_reason_to_refuse(path: Path) -> None:
    """Those that note hidden states stay after the call that asked for them."""
    model = copy.deepcopy(make_model("llama"))
    model.enable_input_require_grads()
    model(input_ids=torch.tensor([[3, 4, 5]]), output_hidden_states=True, use_cache=False)
    assert any(module._forward_hooks for module in model.model.layers)
    assert once(path, PROMPT, model=model) == [0]
    assert once(path, PROMPT) == [whole(len(PROMPT) - 1)]


def test_forwards_of_another_engine_are_no_reason_to_refuse(path: Path) -> None:
    model = copy.deepcopy(make_model("llama")).bfloat16()
    assert once(path, PROMPT, model=model) == [0]
    with LLM(model, skip_tokenizer_init=True, max_model_len=200, max_num_seqs=4):
        assert any("forward" in vars(module) for module in model.modules()) == supported(model)
        assert once(path, PROMPT, model=model) == [whole(len(PROMPT) - 1)]


class _Adapted(torch.nn.Linear):
    """A layer with the attributes of PEFT's tuner layers."""

    disable_adapters = False
    scaling: Mapping[str, float] = {"default": 2.0}
    merged_adapters: Sequence[str] = ()
    active_adapters: Sequence[str] = ("default",)


def test_a_fingerprint_is_that_of_the_state_of_adapters_too() -> None:
    model = copy.deepcopy(make_model("llama"))
    layer = model.model.layers[1].self_attn.v_proj
    plain = fingerprint(model)
    layer.__class__ = _Adapted
    prints = [plain, fingerprint(model)]
    for name, value in {"disable_adapters": True, "active_adapters": [], "scaling": {"default": 1.0}}.items():
        setattr(layer, name, value)
        prints.append(fingerprint(model))
        delattr(layer, name)
    assert len(set(prints)) == len(prints)
    assert fingerprint(model) == prints[1]


def test_a_fingerprint_is_that_of_the_versions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    before = fingerprint(model)
    assert fingerprint(model) == before
    for name in ("torch", "transformers"):
        with monkeypatch.context() as other:
            other.setattr(f"vattn.engine.model.fingerprint.{name}.__version__", "0.1")
            assert fingerprint(model) != before
    monkeypatch.setattr("vattn.__version__", "0.0.1", raising=False)
    assert fingerprint(model) != before


_ENGINE = """
import os, signal, sys
from tests.support.tiny_models import make_model
from vattn.engine import LLM, SamplingParams
from vattn.engine.scheduling import stored
stored.BLOCK_TOKENS = int(sys.argv[2])
llm = LLM(make_model("llama"), skip_tokenizer_init=True, max_model_len=200, max_num_seqs=4, kv_store=sys.argv[1],
          kv_options={"page_size": 4096, "layout": "fused"})
llm.generate([list(map(int, sys.argv[3].split()))], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
if sys.argv[4] == "kill":
    llm.core.stored.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "status"), [("kill", -9), ("exit", 0)])
def test_another_process_finds_what_one_left_that_was_killed_or_never_closed(path: Path, end: str, status: int) -> None:
    done = scripts.run(_ENGINE, str(path), str(BLOCK), " ".join(map(str, PROMPT)), end)
    assert done.returncode == status, done.stderr
    assert once(path, PROMPT) == [whole(len(PROMPT) - 1)]


def test_weights_that_may_have_changed_are_not_taken_for_those_of_the_store(path: Path) -> None:
    model = copy.deepcopy(make_model("llama"))
    with make_llm(model, path) as llm:
        run(llm, PROMPT)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        llm.add_request("read before", PROMPT, GREEDY)
        llm.reset_prefix_cache()
        while llm.has_unfinished():
            for output in llm.step():
                assert output.num_cached_tokens == 0
        llm.core.kv.evict_prefixes()
        stored_before = len(PrefixStore(path).entries())
        (output,) = run(llm, PROMPT)
        run(llm, make_prompts([90], seed=9)[0])
        assert output.num_cached_tokens == 0
        assert len(PrefixStore(path).entries()) == stored_before


# What goes wrong


def test_a_request_that_failed_leaves_nothing(path: Path) -> None:
    with make_llm(make_model("llama"), path) as llm:
        llm.add_request("a", PROMPT, GREEDY)
        llm.step()
        llm.step()
        assert llm.core.stored is not None
        llm.core.stored.flush()
        assert PrefixStore(path).entries()
        (request,) = llm.core.scheduler.running
        llm.core.scheduler.finish(request, FinishReason.ERROR, FloatingPointError())
        llm.core.stored.flush()
        assert PrefixStore(path).entries() == []


@pytest.mark.parametrize("ended", [False, True])
def test_what_was_computed_on_a_request_that_failed_goes_with_it(ended: bool, path: Path) -> None:
    apart = PROMPT[:60:-1]
    with make_llm(make_model("llama"), path) as llm:
        llm.add_request("first", PROMPT, SamplingParams(temperature=0, max_tokens=90))
        llm.step()
        llm.add_request("apart", apart, GREEDY)
        llm.add_request("second", [*PROMPT, *apart], GREEDY)
        for _ in range(MAX_TOKENS + 2 if ended else 2):
            llm.step()
        (first,) = (request for request in llm.core.scheduler.running if request.request_id.startswith("first"))
        llm.core.scheduler.finish(first, FinishReason.ERROR, FloatingPointError())
        for _ in range(MAX_TOKENS):
            llm.step()
    assert once(path, PROMPT, [*apart, 1]) == [0, whole(len(apart))]
    # Its keys lead to what follows them again.
    assert once(path, [*PROMPT, *apart, 1]) == [whole(len(PROMPT))]


def test_a_block_that_begins_with_what_a_failed_request_computed_goes_with_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks on disk are longer than the backend's: another request shares the first of these, and no key on disk."""
    monkeypatch.setattr(stored, "BLOCK_TOKENS", 2 * BLOCK)
    first, second = ([*PROMPT[: BLOCK + 8], *rest] for rest in make_prompts([60, 60], seed=9))
    with make_llm(make_model("llama"), path, "paged", block_size=8) as llm:
        llm.add_request("first", first, SamplingParams(temperature=0, max_tokens=90))
        llm.step()
        llm.add_request("second", second, GREEDY)
        for _ in range(2):
            llm.step()
        failed, other = llm.core.scheduler.running
        assert other.num_cached_tokens == BLOCK + 8
        llm.core.scheduler.finish(failed, FinishReason.ERROR, FloatingPointError())
        for _ in range(MAX_TOKENS):
            llm.step()
    assert once(path, second) == [0]


def test_what_waits_to_be_deleted_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, go = PrefixStore.remove, threading.Event()

    def late(self: PrefixStore, key: bytes) -> None:
        go.wait(30)
        remove(self, key)

    monkeypatch.setattr(PrefixStore, "remove", late)
    with make_llm(make_model("llama"), path) as llm:
        assert llm.core.stored is not None
        llm.add_request("wrong", PROMPT, GREEDY)
        llm.step()
        llm.core.stored.flush()
        (request,) = llm.core.scheduler.running
        llm.core.scheduler.finish(request, FinishReason.ERROR, FloatingPointError())
        llm.add_request("again", PROMPT, GREEDY)
        (again,) = llm.core.scheduler.waiting
        try:
            llm.step()
        finally:
            go.set()
        assert again.num_cached_tokens == 0


@pytest.mark.parametrize("kv", ["virtual", "paged"])
def test_files_that_were_changed_are_computed_anew_and_replaced(kv: str, path: Path) -> None:
    with make_llm(make_model("llama"), path, kv) as llm:
        run(llm, PROMPT)
    store = PrefixStore(path)
    changed = next(entry for entry in store.entries() if entry.head().depth == 2)  # type: ignore[union-attr]
    data = bytearray(changed.path.read_bytes())
    data[-1] ^= 1
    changed.path.write_bytes(data)
    with make_llm(make_model("llama"), path, kv) as llm:
        (output,) = run(llm, PROMPT)
        assert llm.core.stored is not None
        assert llm.core.stored.errors == 1
    assert output.num_cached_tokens == 2 * BLOCK
    assert output.outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
    with make_llm(make_model("llama"), path, kv) as llm:
        assert run(llm, PROMPT)[0].num_cached_tokens == whole(len(PROMPT) - 1)


@pytest.mark.parametrize("harm", ["deleted", "cut off"])
def test_blocks_that_left_the_disk_are_written_when_they_are_computed_again(harm: str, path: Path) -> None:
    with make_llm(make_model("llama"), path) as llm:
        run(llm, PROMPT)
        if harm == "deleted":
            PrefixStore(path).trim(0)
        else:
            os.truncate(PrefixStore(path).entries()[-1].path, 300)  # the first of the prefix
        for cached in (0, whole(len(PROMPT) - 1)):
            llm.core.kv.evict_prefixes()
            assert run(llm, PROMPT)[0].num_cached_tokens == cached


def test_a_full_disk_stops_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(descriptor: int, buffers: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_write", write)
    with make_llm(make_model("llama"), path) as llm:
        outputs = run(llm, PROMPT, *make_prompts([60, 70]))
        figures = {metric.name: metric.value for metric in llm.get_metrics() if metric.name.startswith("vattn:store")}  # type: ignore[attr-defined]
    assert outputs[0].outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
    assert figures["vattn:store_errors"] == 1
    assert figures["vattn:store_dropped"] >= len(PROMPT) // BLOCK
    assert figures["vattn:store_bytes"] == 0
    assert caplog.text.count("No space left on device") == 1


def test_rows_that_cannot_be_copied_stop_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rows.copy_out

    def copy_out(self: Rows, slot: int, start: int, end: int) -> list[torch.Tensor]:
        if start >= 2 * BLOCK:
            raise torch.OutOfMemoryError("no memory for a copy")
        return real(self, slot, start, end)

    with monkeypatch.context() as short, make_llm(make_model("llama"), path) as llm:
        short.setattr(Rows, "copy_out", copy_out)
        (output,) = run(llm, PROMPT)
    assert output.outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
    assert once(path, PROMPT) == [2 * BLOCK]


def test_a_store_that_was_deleted_stops_nothing(path: Path) -> None:
    with make_llm(make_model("llama"), path) as llm:
        run(llm, PROMPT)
        for each in path.iterdir():
            each.unlink()
        path.rmdir()
        llm.core.kv.evict_prefixes()
        (output,) = run(llm, [*PROMPT, 1])
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected("llama", [*PROMPT, 1], MAX_TOKENS)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closed: reading a block takes until it is set."""
    gate, real = threading.Event(), PrefixStore.read

    def read(self: PrefixStore, block: Any, allocate: Any) -> Any:
        gate.wait()
        return real(self, block, allocate)

    monkeypatch.setattr(PrefixStore, "read", read)
    yield gate
    gate.set()


def test_others_go_on_while_a_prefix_is_read(
    path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(path, PROMPT)
    monkeypatch.setattr(background, "PATIENCE", 600.0)
    other = make_prompts([40], seed=10)[0]
    with make_llm(make_model("llama"), path) as llm:
        llm.add_request("reads", PROMPT, GREEDY)
        llm.add_request("other", other, GREEDY)
        outputs = {}
        for _ in range(MAX_TOKENS // 2):
            llm.step()
        scheduler = llm.core.scheduler
        assert [request.request_id for request in scheduler.running] == ["other"]
        assert [request.request_id for request in scheduler.waiting] == ["reads"]
        gate.set()
        while llm.has_unfinished():
            outputs |= {output.request_id: output for output in llm.step()}
        llm.check()
    assert outputs["reads"].num_cached_tokens == whole(len(PROMPT) - 1)
    assert outputs["reads"].outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)
    assert outputs["other"].outputs[0].token_ids == expected("llama", other, MAX_TOKENS)


def test_other_completions_wait_with_the_one_whose_prefix_is_read(
    path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fork its slot, so the prompt is computed by none of them."""
    once(path, PROMPT)
    monkeypatch.setattr(background, "PATIENCE", 600.0)
    computed: list[int] = []
    with make_llm(make_model("llama"), path, on_step=lambda record: computed.append(record.prefill_tokens)) as llm:
        llm.add_request("other", PROMPT[::-1], SamplingParams(temperature=0, max_tokens=2 * MAX_TOKENS))
        llm.add_request("x", PROMPT, SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=MAX_TOKENS))
        for _ in range(3):
            llm.step()
        assert [request.request_id for request in llm.core.scheduler.running] == ["other"]
        assert llm.core.stored is not None
        assert len(llm.core.stored._fetches) == 1
        gate.set()
        outputs = {}
        while llm.has_unfinished():
            outputs |= {output.request_id: output for output in llm.step()}
        assert not llm.core.stored._fetches
        assert llm.core.stored.hit_tokens == outputs["x"].num_cached_tokens == whole(len(PROMPT) - 1)
        llm.check()
    assert sum(computed) == 2 * len(PROMPT) - whole(len(PROMPT) - 1)


def test_a_disk_that_hangs_is_waited_for_once(
    path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(path, PROMPT)
    monkeypatch.setattr(background, "PATIENCE", 0.02)
    with make_llm(make_model("llama"), path) as llm:
        outputs = llm.generate([PROMPT, [*PROMPT, 1]], GREEDY, use_tqdm=False)
        assert llm.core.stored is not None
        assert llm.core.stored.errors == 1
        gate.set()
    for output, prompt in zip(outputs, (PROMPT, [*PROMPT, 1]), strict=True):
        assert output.outputs[0].token_ids == expected("llama", prompt, MAX_TOKENS)


def test_an_aborted_request_is_read_for_no_longer(
    path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(path, PROMPT)
    monkeypatch.setattr(background, "PATIENCE", 600.0)
    with make_llm(make_model("llama"), path) as llm:
        llm.add_request("gone", PROMPT, GREEDY)
        llm.core.abort("gone")
        assert llm.core.stored is not None
        assert not llm.core.stored._fetches
        gate.set()
        assert run(llm, PROMPT)[0].num_cached_tokens == whole(len(PROMPT) - 1)


def test_an_interrupted_call_leaves_nothing_that_was_read(path: Path) -> None:
    """What a reader holds counts against what it may hold: it would read nothing more."""
    once(path, PROMPT)
    with make_llm(make_model("llama"), path) as llm:
        assert llm.core.stored is not None
        reader = llm.core.stored._reader
        reader._most_bytes = 1
        llm.add_request("gone", PROMPT, GREEDY)
        (fetch,) = llm.core.stored._fetches.values()
        assert fetch.ended.wait(60)
        del fetch
        llm.core.abandon(KeyboardInterrupt())
        assert not llm.core.stored._fetches
        wait_until(lambda: not reader._full())
        assert run(llm, PROMPT)[0].num_cached_tokens == whole(len(PROMPT) - 1)


@pytest.mark.parametrize("call", ["admit", "prepare", "copy_in", "commit"])
def test_a_restoration_that_fails_is_a_miss(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    once(path, PROMPT)
    with make_llm(make_model("llama"), path) as llm:
        real, refused = getattr(llm.core.kv, call), []

        def refuse(*arguments: Any, **options: Any) -> Any:
            if not refused:
                refused.append(arguments)
                if call == "copy_in":
                    raise torch.OutOfMemoryError("no memory for a copy")
                raise OutOfPages("no page is free", missing_pages=1, missing_bytes=4096)
            return real(*arguments, **options)

        monkeypatch.setattr(llm.core.kv, call, refuse)
        (output,) = run(llm, PROMPT)
        assert refused
        assert llm.core.stored is not None
        assert not llm.core.stored._fetches
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)


def test_who_waits_for_memory_of_others_reads_its_prefix_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once(path, PROMPT)
    fetch = background.ReadAhead.fetch
    fetched: list[int] = []
    monkeypatch.setattr(
        background.ReadAhead, "fetch", lambda self, blocks: fetched.append(len(blocks)) or fetch(self, blocks)
    )
    with make_llm(make_model("llama"), path) as llm:
        prepare, refused = llm.core.kv.prepare, []

        def refuse(lengths: dict[int, int], *rest: Any, **options: Any) -> None:
            if len(refused) < 8 and any(lengths.values()):
                refused.append(lengths)
                raise OutOfPages("others have it", missing_pages=1, missing_bytes=4096, may_pass=True)
            prepare(lengths, *rest, **options)

        monkeypatch.setattr(llm.core.kv, "prepare", refuse)
        (output,) = run(llm, PROMPT)
    assert len(refused) == 8
    assert fetched == [len(PROMPT) // BLOCK]
    assert output.outputs[0].token_ids == expected("llama", PROMPT, MAX_TOKENS)


@pytest.mark.parametrize("family", ["gemma2", "mistral-window"])
@pytest.mark.parametrize("chunk", [2048, 96])
def test_a_file_of_another_size_is_a_miss_with_windows(
    family: str, chunk: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot was prepared for it, and the tokens that the step computes instead begin further to the front."""
    prompt = make_prompts([190], seed=8)[0]
    options = {"max_model_len": 256, "max_num_batched_tokens": chunk}
    once(path, prompt, model=make_model(family), **options)
    real, ends = Rows.copy_in, list[int]()

    def copy_in(self: Rows, parts: Any, slot: int, start: int, end: int, first: int) -> bool:
        ends.append(end)
        return end != 3 * BLOCK and real(self, parts, slot, start, end, first)

    monkeypatch.setattr(Rows, "copy_in", copy_in)
    with make_llm(make_model(family), path, **options) as llm:
        (output,) = run(llm, prompt)
    assert ends == [BLOCK, 2 * BLOCK, 3 * BLOCK]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected(family, prompt, MAX_TOKENS)


# The option


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_store": 5}, "give a folder"),
        ({"kv_store": ""}, "give a folder"),
        ({"kv_store_size": "big"}, "kv_store_size='big' is not a size"),
        ({"kv": "static"}, "kv='static' has none"),
        ({"kv": "dynamic"}, "kv='dynamic' has none"),
        ({"enable_prefix_caching": False}, "needs enable_prefix_caching=True"),
        ({"scheduling": "static"}, "and scheduling='continuous'"),
    ],
)
def test_what_makes_no_sense_is_refused(path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(make_model("llama"), **{"kv_store": path, "skip_tokenizer_init": True, **options})
    assert not path.exists()


def test_an_engine_that_cannot_be_made_keeps_no_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its error is kept, as notebooks do, another one has the memory."""
    closed: list[VirtualKV] = []
    close = VirtualKV.close

    def noted(kv: VirtualKV) -> None:
        closed.append(kv)
        close(kv)

    monkeypatch.setattr(VirtualKV, "close", noted)
    path.write_text("no folder")
    with pytest.raises(ConfigError, match="store"):
        make_llm(make_model("llama"), path)
    assert len(closed) == 1


def test_a_store_has_no_more_bytes_than_its_size(path: Path) -> None:
    once(path, PROMPT)
    most = PrefixStore(path).bytes // 2
    other = make_prompts([100], seed=9)[0]
    assert once(path, other, kv_store_size=most) == [0]
    assert most // 2 < PrefixStore(path).bytes <= most


def test_a_folder_that_others_can_enter_is_refused(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        make_llm(make_model("llama"), path)


def test_the_figures_of_a_store_are_in_metrics(path: Path) -> None:
    with make_llm(make_model("llama"), path) as llm:
        run(llm, PROMPT)
        text = Exporter(AsyncEngine(llm), "m").text().decode()
    assert f'vattn:store_bytes{{model_name="m"}} {float(PrefixStore(path).bytes)}' in text
    assert 'vattn:store_hits_total{model_name="m"} 0.0' in text
    assert f'vattn:store_queries_total{{model_name="m"}} {float(len(PROMPT))}' in text


def test_without_the_option_there_is_no_store() -> None:
    with LLM(make_model("llama"), skip_tokenizer_init=True) as llm:
        assert llm.core.stored is None
        assert not [metric for metric in llm.get_metrics() if "store" in metric.name]
    assert not [thread for thread in threading.enumerate() if "store" in thread.name]
