"""A paged pool as a server has it after a while."""

from __future__ import annotations

import random

from vattn.engine.kv.paged import PagedKV


def fragment(kv: PagedKV, longest: int) -> None:
    """Requests come, grow by a few tokens at a time, and go, until every block has been taken and given back.

    Args:
        kv: a pool with 16 free slots.
        longest: tokens of the longest request.
    """
    generator = random.Random(0)
    lengths: dict[int, int] = {}
    for _ in range(20 * kv.num_blocks // 16):
        if len(lengths) < 16 and generator.random() < 0.2:
            lengths[kv.allocate(1)] = 0
        for slot in list(lengths):
            more = lengths[slot] + generator.randint(1, 4 * kv.block_size)
            if more <= longest and kv.needed(more, slot) <= kv.available():
                lengths[slot] = more
                kv.prepare({slot: more})
            elif generator.random() < 0.5:
                kv.free(slot)
                del lengths[slot]
    for slot in generator.sample(sorted(lengths), len(lengths)):
        kv.free(slot)
