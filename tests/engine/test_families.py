"""All backends give the tokens that `generate` gives for each prompt alone, whatever shares the batch."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import KVS, MAIN_KVS, PAGED_WINDOWS, chosen
from tests.support.effort import covering, effort
from tests.support.tiny_models import FAMILIES, expected, make_model, make_prompts
from vattn.engine import LLM, SamplingParams
from vattn.engine.kv.paged import PagedKV
from vattn.engine.kv.virtual import VirtualKV
from vattn.engine.scheduling.swap import PreemptionMode

MAX_TOKENS = 14
WITH_WINDOWS = ("gemma2", "gemma3", "gpt-oss")


def sizes(family: str, kv: str) -> dict[str, int]:
    """Latents of 48 elements fill whole pages in blocks of 128 tokens only."""
    return {"block_size": 128} if kv == PAGED_WINDOWS and family.startswith("deepseek") else {}


# A short run: every family over the first backend, and over one of the others in turn.
_FIRST, *_REST = KVS
_PAIRS = [(family, kv) for n, family in enumerate(FAMILIES) for kv in effort((_FIRST, _REST[n % len(_REST)]), KVS)]


@pytest.mark.parametrize(("family", "kv"), _PAIRS)
def test_tokens_equal_generate_alone(family: str, kv: str) -> None:
    """Prompts from one token to longer than every window, chunked prefill, mixed steps, more requests than slots."""
    prompts = make_prompts([1, 23, 5, 40, 12])
    with LLM(make_model(family), **chosen(kv, **sizes(family, kv), max_num_seqs=3, max_num_batched_tokens=11)) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        llm.check()
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [expected(family, prompt, MAX_TOKENS, found) for prompt, found in zip(prompts, got, strict=True)]


def test_late_arrivals(kv: str) -> None:
    prompts = make_prompts([30, 3, 17, 8, 25, 1])
    got: dict[str, list[int]] = {}
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(make_model("llama"), **chosen(kv, max_num_seqs=4, max_num_batched_tokens=16)) as llm:
        step = 0
        while step < 2 * len(prompts) or llm.has_unfinished():
            if step % 2 == 0 and step // 2 < len(prompts):
                llm.add_request(f"late-{step // 2}", prompts[step // 2], params)
            for output in llm.step():
                got[output.request_id] = output.outputs[0].token_ids
            llm.check()
            step += 1
    assert got == {f"late-{i}": expected("llama", p, MAX_TOKENS) for i, p in enumerate(prompts)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv", "mode"),
    covering(
        ["llama", "gpt-oss", "deepseek-v2", "mistral-window", "gemma2", "deepseek-v3"], MAIN_KVS, ["recompute", "swap"]
    ),
)
def test_preemption(family: str, kv: str, mode: PreemptionMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that cannot hold all running requests to their ends: some are preempted, none gives another token."""
    prompts = make_prompts([20, 21, 22, 23])
    # Several pages of a layer, or blocks.
    longest = 256 if sizes(family, kv) or family == "llama" else 128 if kv == "virtual" else 88
    max_tokens = longest - 28
    # Admission cannot foresee how long they become.
    monkeypatch.setattr("vattn.engine.scheduling.scheduler.HEADROOM_TOKENS", min(64, max_tokens - 36))
    model = make_model(family)
    options = {"page_size": 4096, "eager_pages": 0, "layout": "sliced"} if kv == "virtual" else {}
    with LLM(model, max_num_seqs=1) as llm:
        budget = 12 * longest * llm.token_bytes // 5  # 2.4 of the longest requests
    with LLM(
        model,
        **chosen(
            kv,
            **sizes(family, kv),
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=longest,
            memory_budget=budget,
            kv_options=options,
            preemption_mode=mode,
        ),
    ) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
        llm.check()
        swap = llm.core.scheduler.swap
        assert swap is not None
        # Static has two slots in this budget, and nobody can take memory from either; behind windows there is more.
        roomy = kv == "static" or (kv == "virtual" and family in WITH_WINDOWS)
        assert (swap.num_saved > 0) == (mode == "swap" and not roomy)
        assert swap.num_loaded == swap.num_saved
        assert swap.used_bytes == 0
    assert (sum(output.metrics.num_preemptions for output in outputs) > 0) == (not roomy)
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [expected(family, prompt, max_tokens, found) for prompt, found in zip(prompts, got, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"),
    covering([family for family in FAMILIES if "window" in family or family in WITH_WINDOWS], ["recompute", "swap"]),
)
def test_memory_behind_windows_is_given_back(family: str, mode: PreemptionMode) -> None:
    """Contexts of many windows, in pages of few tokens; requests that are preempted and find their prefixes again."""
    prompts = make_prompts([150, 130, 170, 10])
    prompts.append(prompts[0][:140] + prompts[1][:20])
    max_tokens = 60
    with LLM(
        make_model(family),
        max_num_seqs=3,
        max_num_batched_tokens=24,
        kv_options={"page_size": 4096, "eager_pages": 0, "layout": "fused"},
        preemption_mode=mode,
    ) as llm:
        assert isinstance(llm.core.kv, VirtualKV)
        cache = llm.core.kv.cache
        taken: list[int] = []

        def watch(_: object) -> None:
            taken.append(max((slot.pages for slot in cache.page_map() if slot.active), default=0))
            if len(taken) % 20 == 0 and llm.core.scheduler.running:
                llm.core.scheduler.preempt_last()

        llm.on_step = watch
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
        llm.check()
        most = cache.layout.most_pages(170 + max_tokens, 2 * 24)  # a chunk, and one mapped ahead
        assert max(taken) <= most < cache.layout.pages(170 + max_tokens)
        swap = llm.core.scheduler.swap
        assert swap is not None
        assert (swap.num_loaded > 0) == (mode == "swap")
    assert sum(output.metrics.num_preemptions for output in outputs) > 1
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [expected(family, prompt, max_tokens, found) for prompt, found in zip(prompts, got, strict=True)]


@pytest.mark.slow
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models' tokens depend on what the cache holds: a cache that forgets one token in ten is noticed."""
    read = PagedKV.read

    def forgetful(
        self: PagedKV, layer: int, slot: int, length: int, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = read(self, layer, slot, length, start)
        key[:, :, ::10], value[:, :, ::10] = 0, 0
        return key, value

    monkeypatch.setattr(PagedKV, "read", forgetful)
    for family in FAMILIES:
        prompts = make_prompts([23, 40])
        with LLM(make_model(family), kv="paged", attention="torch_sdpa") as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        got = [output.outputs[0].token_ids for output in outputs]
        assert got != [expected(family, prompt, MAX_TOKENS) for prompt in prompts], family
