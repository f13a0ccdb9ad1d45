"""Sleep, wake up, forget prefixes: what it frees, what goes on, what is refused meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.backends import PAGED_WINDOWS, chosen
from tests.support.tiny_models import expected, make_model, make_prompts, make_tokenizer
from vattn.engine import LLM, AsyncEngine, BeamSearchParams, EngineAsleep, SamplingParams
from vattn.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def make_llm(kv: str = "virtual", **keywords: Any) -> LLM:
    options = {"page_size": 4096} if kv == "virtual" else None
    defaults = {"max_model_len": 128, "memory_budget": "4MiB", "max_num_seqs": 4, "kv_options": options}
    return LLM(make_model("llama"), **chosen(kv, **{**defaults, **keywords}))


def finish(llm: LLM) -> dict[str, list[int]]:
    found = {}
    while llm.has_unfinished():
        for output in llm.step():
            found[output.request_id] = output.outputs[0].token_ids
        llm.check()
    return found


@pytest.mark.parametrize(
    ("kv", "options"), [("virtual", {}), ("virtual", {"kv_cache_dtype": "int8"}), (PAGED_WINDOWS, {}), ("dynamic", {})]
)
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_all_memory_is_given_back_and_requests_go_on(kv: str, options: dict[str, Any], preemption_mode: Any) -> None:
    prompts = make_prompts([30, 41, 5, 17, 22])
    plain = [expected("llama", prompt, 24) for prompt in prompts]
    with make_llm(kv, preemption_mode=preemption_mode, **options) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        if not options:
            assert want == plain
        for name, prompt in enumerate(prompts):
            llm.add_request(str(name), prompt, GREEDY)
        for _ in range(9):
            llm.step()
        before = llm.core.kv.stats().physical_bytes
        assert before > 0
        freed = llm.sleep()
        assert freed == (0 if kv == "dynamic" else before)
        assert llm.core.kv.stats().physical_bytes == 0
        assert llm.is_sleeping()
        llm.check()
        llm.add_request("late", prompts[0], GREEDY)
        llm.abort("1")
        assert llm.sleep(1) == 0
        assert llm.core.kv.stats().physical_bytes == 0
        assert llm.wake_up() is True
        assert llm.wake_up() is True
        assert not llm.is_sleeping()
        assert finish(llm) == {"0": want[0], "2": want[2], "3": want[3], "4": want[4], "late": want[0]}
        assert llm.core.kv.available() == llm.core.kv.total()


def test_nothing_computes_while_it_sleeps() -> None:
    with make_llm(tokenizer=make_tokenizer()) as llm:
        llm.sleep()
        for call in (
            lambda: llm.generate("w5", use_tqdm=False),
            lambda: llm.chat([{"role": "user", "content": "w5"}], chat_template="w5", use_tqdm=False),
            lambda: llm.beam_search("w5", BeamSearchParams(beam_width=2, max_tokens=2)),
            llm.step,
        ):
            with pytest.raises(EngineAsleep, match="while the engine sleeps; call wake_up"):
                call()
        assert not llm.has_unfinished()
        llm.enqueue("w5", GREEDY)
        with pytest.raises(EngineAsleep):
            llm.wait_for_completion(use_tqdm=False)
        llm.wake_up()
        assert len(llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids) == 24


def test_waking_up_in_parts() -> None:
    """As in vLLM; weights never sleep, so the cache decides."""
    with make_llm() as llm:
        llm.sleep()
        for tags in (["weights"], ("scheduling",), []):
            assert llm.wake_up(tags=tags) is False
            assert llm.is_sleeping()
        tags: Any
        for tags, message in (
            (["kv-cache"], "tags='kv-cache' is not one of weights, kv_cache, scheduling"),
            (["kv_cache", 5], "tags=5 is not one of"),
            ("kv_cache", "tags is 'kv_cache'; give a list of weights"),
            (5, "tags is 5; give a list"),
        ):
            with pytest.raises(ConfigError, match=message):
                llm.wake_up(tags)
            assert llm.is_sleeping()
        assert llm.wake_up(["kv_cache"]) is True
        assert llm.wake_up(["weights"]) is True
        assert not llm.is_sleeping()


def test_a_static_batch_ends_with_sleep() -> None:
    prompts = make_prompts([9, 12, 7])
    want = {str(i): expected("llama", prompts[i], 3 + 9 * i) for i in (1, 2)}
    with make_llm("dynamic", scheduling="static", enable_prefix_caching=False) as llm:
        for name, prompt in enumerate(prompts):
            llm.add_request(str(name), prompt, SamplingParams(temperature=0, max_tokens=3 + 9 * name))
        for _ in range(6):
            llm.step()
        llm.sleep()
        llm.check()
        llm.wake_up()
        assert finish(llm) == want


@pytest.mark.parametrize("kv", ["paged", "static"])
def test_backends_that_keep_their_memory_refuse(kv: str) -> None:
    prompt = make_prompts([9])[0]
    want = expected("llama", prompt, 24)
    with make_llm(kv) as llm:
        llm.add_request("a", prompt, GREEDY)
        llm.step()
        with pytest.raises(ConfigError, match=f"kv='{kv}' has all its memory from its start to its end; use kv="):
            llm.sleep()
        assert not llm.is_sleeping()
        assert finish(llm) == {"a": want}


@pytest.mark.parametrize("level", [0, 2, "1", None, True])
def test_there_is_one_level(level: Any) -> None:
    with make_llm() as llm:
        with pytest.raises(ConfigError, match="the only one is 1"):
            llm.sleep(level)
        assert not llm.is_sleeping()


def test_prefixes_are_forgotten(caching_kv: str) -> None:
    prompt = make_prompts([200])[0]
    want = expected("llama", prompt, 24)
    with make_llm(caching_kv, max_model_len=256) as llm:

        def cached() -> int:
            return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

        assert cached() == 0
        assert cached() > 0
        assert llm.reset_prefix_cache() is True
        assert cached() == 0
        llm.add_request("a", prompt, GREEDY)
        for _ in range(3):
            llm.step()
        assert llm.reset_prefix_cache() is False
        assert llm.reset_prefix_cache(reset_running_requests=True) is True
        llm.check()
        assert finish(llm) == {"a": want}
        if caching_kv == "virtual":
            assert cached() > 0
            llm.sleep()
            llm.wake_up()
            assert cached() == 0


def test_the_asynchronous_engine_sleeps_between_steps() -> None:
    async def main() -> None:
        prompts = make_prompts([30, 41])
        want = [expected("llama", *what) for what in ((prompts[0], 60), (prompts[1], 60), (prompts[0], 24))]
        engine = AsyncEngine(make_llm())
        try:
            streams = [await engine.add(prompt, SamplingParams(temperature=0, max_tokens=60)) for prompt in prompts]
            first = [await anext(stream) for stream in streams]
            assert await engine.sleep() > 0
            assert await engine.is_sleeping()
            assert engine.core.kv.stats().physical_bytes == 0
            streams.append(await engine.add(prompts[0], GREEDY))
            with pytest.raises(ConfigError, match="the only one is 1"):
                await engine.sleep(2)
            await asyncio.sleep(0.05)
            assert engine.core.kv.stats().physical_bytes == 0, "nothing runs"
            metrics = {metric.name: metric for metric in await engine.get_metrics()}
            assert metrics["vllm:num_requests_waiting"].value == 3  # type: ignore[attr-defined]
            assert await engine.wake_up(["weights"]) is False
            assert await engine.wake_up() is True
            for stream, before, wanted in zip(streams, [*first, None], want, strict=True):
                tokens = [] if before is None else list(before.outputs[0].token_ids)
                async for output in stream:
                    for completion in output.outputs:
                        tokens += completion.token_ids
                assert tokens == wanted
            assert await engine.reset_prefix_cache()
            # A shutdown wakes it up for what waits.
            await engine.sleep()
            last = await engine.add(prompts[1], GREEDY)
            await engine.shutdown()
            assert sum([len(output.outputs[0].token_ids) async for output in last if output.outputs]) == 24
        finally:
            await engine.shutdown(timeout=0)

    asyncio.run(main())
