"""A real run of the engine on this CPU, and the replay of the same requests: both have to count the same."""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from dataclasses import dataclass

from bench.harness.models import TINY, qwen2
from vattn.engine import LLM, SamplingParams
from vattn.engine.scheduling.record import StepRecord
from vattn.layout import LayoutName
from vattn.model_shapes import shape_of

from .gpus import Fitted
from .provider import Clock
from .replay import SAMPLED_STEPS, TOKEN, Replay
from .stores import VirtualStore
from .traces import Trace

_TRACE = Trace("check", (math.log(40), 0.5), (math.log(120), 0.5))
_MODEL = TINY | {"num_hidden_layers": 2, "num_attention_heads": 14, "num_key_value_heads": 2}
_SLOTS, _TOKENS_PER_STEP, _MOST_TOKENS = 16, 128, 2048
# Room for about half of what the slots would need.
_PAGE_SIZE, _PAGES = 2**12, {"fused": 24, "sliced": 24, "layer": 32}


@dataclass(frozen=True)
class Counted:
    """What a run has counted; `seconds` are those of its steps' model."""

    steps: int
    output_tokens: int
    preemptions: int
    map_calls: int
    waste: float
    seconds: float


def real_and_replayed(requests: int, layout: LayoutName) -> tuple[Counted, Counted]:
    """What a real run counts, and what its replay does under a clock fitted to the first half of the run's steps."""
    records = _run(requests, layout)
    sampled = [record.kv for record in records[SAMPLED_STEPS - 1 :: SAMPLED_STEPS]]
    real = Counted(
        steps=len(records),
        output_tokens=sum(turn.output for turn in itertools.islice(_TRACE.begin(), requests)),
        preemptions=sum(record.num_preempted for record in records),
        map_calls=records[-1].kv.map_calls,
        waste=1 - sum(kv.live_bytes for kv in sampled) / sum(kv.used_bytes for kv in sampled),
        seconds=sum(record.forward_seconds for record in records),
    )
    clock = Clock()
    config = qwen2(**_MODEL).config
    store = VirtualStore(
        shape_of(config, "check", dtype="bfloat16"),
        layout,
        budget=_PAGES[layout] * _PAGE_SIZE,
        slots=_SLOTS,
        max_context_len=_MOST_TOKENS,
        chunk_tokens=_TOKENS_PER_STEP,
        clocks=[clock],
        page_size=_PAGE_SIZE,
    )
    with closing(store):
        replay = Replay(
            store,
            _TRACE,
            {"fitted": (Fitted.to(records[: len(records) // 2]), clock)},
            requests=requests,
            slots=_SLOTS,
            tokens_per_step=_TOKENS_PER_STEP,
        )
        found = replay.run()
    replayed = Counted(
        steps=found.steps,
        output_tokens=found.output_tokens,
        preemptions=found.preemptions,
        map_calls=found.map_calls,
        waste=found.waste,
        seconds=clock.now - clock.waited,
    )
    return real, replayed


def _run(requests: int, layout: LayoutName) -> list[StepRecord]:
    """The steps of a real engine that serves the trace."""
    records: list[StepRecord] = []
    turns = list(itertools.islice(_TRACE.begin(), requests))
    params = [SamplingParams(max_tokens=turn.output, ignore_eos=True, allowed_token_ids=[TOKEN]) for turn in turns]
    vocabulary = _MODEL["vocab_size"]
    with LLM(
        qwen2(**_MODEL),
        skip_tokenizer_init=True,
        max_num_seqs=_SLOTS,
        max_model_len=_MOST_TOKENS,
        max_num_batched_tokens=_TOKENS_PER_STEP,
        memory_budget=_PAGES[layout] * _PAGE_SIZE,
        preemption_mode="recompute",
        enable_prefix_caching=False,
        kv_options={"layout": layout, "page_size": _PAGE_SIZE, "kv_order": "NHD"},
        on_step=records.append,
    ) as llm:
        llm.generate([[token % vocabulary for token in turn.prompt] for turn in turns], params, use_tqdm=False)
    return records
