"""Slots more than 100 GB apart: every kernel must read the last slot as it reads the first."""

from __future__ import annotations

import torch

from bench.gpu import PAGE
from bench.gpu.device import DEVICE, DTYPE, HEAD_DIM, HEADS, KV_HEADS, STUB, random, usable_kernels
from bench.gpu.figures import Figures
from bench.harness.report import Goal, Report
from vattn import KVConfig
from vattn.attention import AttentionParams, PackedBatch, Span
from vattn.engine.kv.virtual import VirtualKV

ABOUT = "slots more than 100 GB apart"
RANK = 14
SECONDS = 20

_LENGTH = 500


def run(quick: bool) -> Report:
    figures = Figures()
    for layout, tokens in (("layer", 2**24), ("fused", 2**20)):
        layers = 1 if layout == "layer" else 16
        config = KVConfig.from_options(
            num_layers=layers,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=DTYPE,
            max_batch_size=5,
            max_context_len=tokens,
            device="cuda",
            memory_budget=256 * PAGE,
            layout=layout,
            kv_order="NHD",
        )
        kv = VirtualKV(config)
        slots = sorted(kv.allocate(_LENGTH) for _ in range(5))
        kv.prepare(dict.fromkeys(slots, _LENGTH))
        stored = kv.stored(layers - 1)
        apart = (stored.key[slots[-1]].data_ptr() - stored.key[slots[0]].data_ptr()) / 1e9
        for side in (stored.key, stored.value):
            rows = torch.randn(_LENGTH, KV_HEADS, HEAD_DIM, device=side.device).to(DTYPE)
            for slot in (slots[0], slots[-1]):
                side[slot, :_LENGTH] = rows
            assert torch.equal(side[slots[0], :_LENGTH], side[slots[-1], :_LENGTH])
        params = AttentionParams()
        batch = PackedBatch.pack([Span(s, _LENGTH - 1, _LENGTH) for s in (slots[0], slots[-1])], DEVICE)
        query = random(1, HEADS, HEAD_DIM).expand(2, -1, -1).contiguous()
        for kernel in usable_kernels():
            first, last = kernel(query, kv, layers - 1, batch, params)
            same = "yes" if torch.equal(first, last) else "NO"
            figures.append({"layout": layout, "kernel": kernel.name, "GB apart": apart, "same output": same})
        del stored
        kv.close()
    wrong = sum(row["same output"] == "NO" for row in figures)
    return Report(
        parameters={"length": _LENGTH, "stub": STUB},
        figures=figures,
        goals=[
            Goal("least distance of the slots in GB", min(float(row["GB apart"]) for row in figures), ">=", 100),
            Goal("kernels that read the last slot wrong", wrong, "==", 0),
        ],
        timed=False,
    )
