"""What the state machines over a cache have in common: a small cache of random options on a driver that can fail."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize

import vattn
from tests.support.faults import FaultyTable
from tests.support.target import DEVICE, EXAMPLES

SLOTS = 4
PAGE = 4096


def makes_cache(**own: st.SearchStrategy[Any]) -> Any:
    """The decorator of a method that draws a cache's options: those that every machine draws, and its `own`."""
    return initialize(
        layout=st.sampled_from(["layer", "sliced", "fused"]),
        kv_order=st.sampled_from(["NHD", "HND"]),
        overlap=st.booleans(),
        deferred_reclamation=st.booleans(),
        eager_pages=st.integers(0, 2),
        watermark=st.sampled_from([0.0, 0.3]),
        guard_rows=st.sampled_from([0, 3]),
        **own,
    )


def examples(count: int = EXAMPLES, steps: int = 30) -> settings:
    return settings(
        max_examples=count, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )


class Machine(RuleBasedStateMachine):
    """A cache of two layers, each with its own window or none, in a pool of its own."""

    def make_cache(
        self, context: int, pages: int, windows: tuple[int | None, int | None], v_head_dim: int, **options: Any
    ) -> None:
        self.table = FaultyTable()
        self.windows = windows
        self.pool = vattn.PagePool(pages * PAGE, device=DEVICE, page_size=PAGE, table=self.table.addresses)
        config = vattn.KVConfig(
            groups=[
                vattn.TensorGroup(
                    layers=[layer], num_kv_heads=2, head_dim=64, v_head_dim=v_head_dim, sliding_window=window
                )
                for layer, window in enumerate(windows)
            ],
            dtype="float32",
            max_batch_size=SLOTS,
            max_context_len=context,
            device=DEVICE,
            memory_budget=pages * PAGE,
            page_size=PAGE,
            **options,
        )
        self.cache = vattn.KVCache(config, pool=self.pool)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.table.heal()
            self.cache.close()
            self.pool.close()
