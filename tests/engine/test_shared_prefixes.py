"""An engine that finds what another one has computed says what it says alone."""

from __future__ import annotations

import copy
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import brokers, scripts
from tests.support.tiny_models import expected, make_model, make_prompts
from tests.support.waiting import wait_until
from vattn.engine import LLM, RequestOutput, SamplingParams
from vattn.engine.kv.virtual import VirtualKV
from vattn.engine.requests.request import FinishReason
from vattn.engine.scheduling import stored
from vattn.errors import ConfigError
from vattn.pool.lent import LentCore
from vattn.pool.shares import Shares
from vattn.slots import exchange
from vattn.store.folder import PrefixStore

MIB = 2**20
MAX_TOKENS = 20
PROMPT = make_prompts([150], seed=8)[0]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture
def broker() -> Iterator[brokers.Process]:
    with brokers.running(8 * MIB) as process:
        yield process


def make_llm(family: str = "llama", **options: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "max_model_len": 200, "max_num_seqs": 4, "kv_pool": brokers.NAME}
    pages = {"kv_options": {"page_size": 4096, "layout": "fused"}, "kv_share_prefixes": True}
    model = options.pop("model", None) or make_model(family)
    return LLM(model, **{**defaults, **pages, **options})


def shares(llm: LLM) -> Shares:
    assert isinstance(llm.core.kv, VirtualKV)
    core = llm.core.kv.cache._core
    assert isinstance(core, LentCore)
    assert core.shares is not None
    return core.shares


def run(llm: LLM, prompt: list[int], sampling: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    given = {"prompt_token_ids": prompt, **options}
    (output,) = llm.generate([given], sampling, use_tqdm=False)
    llm.check()
    return output


def publish(llm: LLM, prompt: list[int], **options: Any) -> None:
    """Computes a prompt, and waits until others can find its blocks."""
    run(llm, prompt, **options)
    directory = shares(llm).directory
    whole = (len(prompt) + MAX_TOKENS - 1) // directory.shape.block_tokens
    wait_until(lambda: sum(1 for _ in directory.entries()) >= whole)


def meet(llm: LLM, count: int = 1) -> None:
    wait_until(lambda: len(shares(llm).peers) >= count)


def test_a_second_replica_computes_no_shared_prompt(broker: brokers.Process) -> None:
    alone = expected("llama", [*PROMPT, 5, 6], MAX_TOKENS)
    with make_llm() as first, make_llm() as second:
        publish(first, PROMPT)
        meet(second)
        output = run(second, [*PROMPT, 5, 6])
        assert output.num_cached_tokens >= len(PROMPT) - 32
        assert output.outputs[0].token_ids == alone
        again = run(first, [*PROMPT, 5, 6])
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        figures = {metric.name: metric.value for metric in second.get_metrics() if hasattr(metric, "value")}
        assert figures["vattn:pool_shared_bytes"] > 0
        assert broker.problems() == []


def test_a_store_on_disk_may_be_there_as_well(broker: brokers.Process, tmp_path: Path) -> None:
    alone = expected("llama", [*PROMPT, 5, 6], MAX_TOKENS)
    store = {"kv_store": tmp_path / "store"}
    with make_llm(**store) as first, make_llm(**store) as second:
        publish(first, PROMPT)
        meet(second)
        output = run(second, [*PROMPT, 5, 6])
        assert output.num_cached_tokens >= len(PROMPT) - 32
        assert output.outputs[0].token_ids == alone
        assert shares(second).foreign_pages


@pytest.mark.parametrize("block", [8, 64])
@pytest.mark.parametrize("when", ["running", "ended", "closed"])
def test_a_store_has_nothing_of_what_another_engine_found_to_be_wrong(
    broker: brokers.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, block: int
) -> None:
    """Neither what was mapped nor what was computed on it; its blocks are smaller than the cache's, or larger."""
    monkeypatch.setattr(stored, "BLOCK_TOKENS", block)
    monkeypatch.setattr(exchange, "_UNUSED_NS", 10**12)  # a machine that is slow releases nothing meanwhile
    path, apart = tmp_path / "store", PROMPT[::-1]
    with make_llm() as owner, make_llm(kv_store=path) as reader:
        kept = on_disk(reader, path, apart)
        meet(reader)
        owner.add_request("wrong", {"prompt_token_ids": PROMPT}, GREEDY)
        owner.step()
        wait_until(lambda: not owner.core.kv.publishing)
        reader.add_request("reader", {"prompt_token_ids": [*PROMPT, 5, 6]}, GREEDY)
        for _ in range(MAX_TOKENS if when == "ended" else 2):
            reader.step()
        assert shares(reader).foreign_pages
        assert len(on_disk(reader, path)) > len(kept)
        (request,) = owner.core.scheduler.running
        owner.core.scheduler.finish(request, FinishReason.ERROR, FloatingPointError())
        if when == "closed":
            reader.close()
            assert {entry.key for entry in PrefixStore(path).entries()} == kept
            return
        for _ in range(MAX_TOKENS):
            reader.step()
        assert on_disk(reader, path) == kept
        output = run(reader, [*PROMPT, 5, 6])
        assert output.num_cached_tokens == 0
        assert len(on_disk(reader, path)) > len(kept), "what was computed anew is written"


def test_what_was_read_before_it_was_found_to_be_wrong_is_not_used(
    broker: brokers.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "BLOCK_TOKENS", 16)
    path = tmp_path / "store"
    with make_llm() as owner, make_llm(kv_store=path) as reader:
        meet(reader)
        owner.add_request("wrong", {"prompt_token_ids": PROMPT}, GREEDY)
        owner.step()
        wait_until(lambda: not owner.core.kv.publishing)
        reader.add_request("first", {"prompt_token_ids": PROMPT}, GREEDY)
        reader.step()
        assert on_disk(reader, path)
        monkeypatch.setattr(VirtualKV, "find", lambda *_, **__: 0)  # so that all of it is read
        reader.add_request("second", {"prompt_token_ids": [*PROMPT, 5, 6]}, GREEDY)
        (waiting,) = reader.core.scheduler.waiting
        assert reader.core.stored is not None
        assert reader.core.stored.wait(waiting)
        (request,) = owner.core.scheduler.running
        owner.core.scheduler.finish(request, FinishReason.ERROR, FloatingPointError())
        reader.step()
        assert waiting.num_cached_tokens == 0


def on_disk(llm: LLM, path: Path, *prompts: list[int]) -> set[bytes]:
    """The keys of what is stored, after these prompts."""
    for prompt in prompts:
        run(llm, prompt)
    assert llm.core.stored is not None
    llm.core.stored.flush()
    return {entry.key for entry in PrefixStore(path).entries()}


_SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.engine.test_shared_prefixes import PROMPT, make_llm, publish
llm = make_llm()
publish(llm, PROMPT)
print("ready", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_an_engine_that_is_killed_takes_nothing_from_another_and_finds_it_again(broker: brokers.Process) -> None:
    prompts = [*PROMPT, 5, 6], [*PROMPT, 7]
    alone = [expected("llama", prompt, MAX_TOKENS) for prompt in prompts]
    process = scripts.start(_SCRIPT)
    assert process.stderr is not None
    for line in process.stderr:
        if line == "ready\n":
            break
    with make_llm() as reader:
        meet(reader)
        found: list[RequestOutput] = []
        thread = threading.Thread(target=lambda: found.append(run(reader, prompts[0])))
        thread.start()
        wait_until(lambda: shares(reader).foreign_pages or found)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        thread.join()
        assert found[0].num_cached_tokens >= len(PROMPT) - 32
        assert found[0].outputs[0].token_ids == alone[0]
        wait_until(lambda: broker.ask("top")["kept"])
    with make_llm() as restarted:
        meet(restarted)
        output = run(restarted, prompts[1])
        assert output.num_cached_tokens >= len(PROMPT) - 32
        assert output.outputs[0].token_ids == alone[1]
        assert broker.problems() == []


def test_tenants_and_other_models_find_nothing(broker: brokers.Process) -> None:
    other = make_model("llama")
    with make_llm() as first, make_llm(model=_changed(other)) as changed, make_llm() as second:
        publish(first, PROMPT, cache_salt="one")
        meet(second)
        assert run(second, PROMPT).num_cached_tokens == 0
        assert run(second, PROMPT, cache_salt="two").num_cached_tokens == 0
        assert run(second, [*PROMPT, 1], cache_salt="one").num_cached_tokens
        assert shares(changed).peers == []
        assert run(changed, PROMPT, cache_salt="one").num_cached_tokens == 0


def _changed(model: Any) -> Any:
    changed = copy.deepcopy(model)
    next(iter(changed.parameters())).data[0, 0] += 1
    return changed


def test_what_a_request_keeps_to_itself_is_not_shared(broker: brokers.Process) -> None:
    with make_llm() as first, make_llm() as second:
        meet(second)
        run(first, PROMPT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
        assert run(second, PROMPT).num_cached_tokens == 0


def test_after_a_reset_a_model_that_may_have_changed_shares_nothing(broker: brokers.Process) -> None:
    with make_llm() as first, make_llm() as second:
        publish(first, PROMPT)
        meet(second)
        first.reset_prefix_cache()
        assert run(second, PROMPT).num_cached_tokens == 0
        wait_until(lambda: sum(1 for _ in shares(second).directory.entries()))
        meet(first)
        assert run(first, PROMPT).num_cached_tokens == 0


def test_a_pool_is_shared_without_prefixes_unless_asked_for(
    broker: brokers.Process, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), make_llm(kv_share_prefixes=False) as first:
        run(first, PROMPT)
        assert isinstance(first.core.kv, VirtualKV)
        assert first.core.kv.cache._core.shares is None  # type: ignore[attr-defined]
    assert "hashed" not in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_pool": None}, "kv_share_prefixes needs a kv_pool"),
        ({"enable_prefix_caching": False}, "kv_share_prefixes needs a kv_pool, and enable_prefix_caching"),
        ({"family": "gemma2"}, "sliding windows are not shared"),
    ],
)
def test_what_cannot_be_shared_is_refused(broker: brokers.Process, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_llm(**options)
