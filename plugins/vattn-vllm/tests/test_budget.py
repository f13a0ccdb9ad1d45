"""Several engines in one budget: decisions of one are seen by the others, and memory moves to who needs it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vattn_vllm.budget import SharedBudget
from vattn_vllm.hooks import _Backed
from vattn_vllm.options import Options
from vllm.v1.core.block_pool import BlockPool

from vattn.errors import ConfigError

NAME = f"test-{os.getpid()}"


def options(**given: Any) -> Options:
    return Options.of(SimpleNamespace(additional_config={"vattn": given}))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["chat", "a/b:1GiB", ":1GiB", "chat:much"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ConfigError, match="shared_budget"):
        options(shared_budget=text)


OTHER = """
import sys, time
from vattn_vllm.budget import SharedBudget
budget = SharedBudget(sys.argv[1])
with budget.deciding() as share:
    print(share.most)
    share.used = 600
with budget.deciding() as share:
    print(share.most, flush=True)
sys.stdin.read()
"""


def path(name: str) -> Path:
    return Path(f"/dev/shm/vattn-budget-{os.getuid()}-{NAME}-{name}")


def test_engines_see_what_others_have() -> None:
    text = f"{NAME}-seen:1000B"
    budget = SharedBudget(text)
    with budget.deciding() as share:
        assert share.most == 1000
        share.used = 300
    other = subprocess.Popen([sys.executable, "-c", OTHER, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert [int(other.stdout.readline()) for _ in range(2)] == [700, 700]
    with budget.deciding() as share:
        assert share.most == 400
    other.kill()
    other.wait()
    with budget.deciding() as share:
        assert share.most == 1000, "the other engine is gone"
    # Its number is free again, and what it had is not the next one's.
    again = SharedBudget(text)
    with again.deciding() as share:
        assert share.most == 700
    with budget.deciding() as share:
        assert share.most == 1000
    del again
    assert path("seen").exists()
    del budget
    assert not path("seen").exists()


def test_the_file_of_killed_engines_goes_when_another_starts() -> None:
    text = f"{NAME}-killed:1000B"
    other = subprocess.Popen([sys.executable, "-c", OTHER, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    SharedBudget(f"{NAME}-unrelated:1B")
    assert path("killed").exists(), "its engine lives"
    other.kill()
    other.wait()
    assert path("killed").exists()
    SharedBudget(f"{NAME}-unrelated:1B")
    assert not path("killed").exists()
    assert not path("unrelated").exists()


@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("shows_null", [False, True])
def test_random_requests_never_exceed_the_budget_nor_lose_contents(
    limited: bool, keep: float, shows_null: bool
) -> None:
    """Against vLLM's own block pool: what is backed, what a block holds, and what the pool believes."""
    rng = random.Random(4)
    blocks, most = 40, 18
    pool = BlockPool(blocks, enable_caching=True, hash_block_size=16)
    given = {"shared_budget": f"{NAME}-random:{most * 10}B"} if limited else {}
    backed = _Backed(
        pool, options(keep_free=keep / 3, keep_cached=keep, **given), block_bytes=10, shows_null=shows_null
    )
    memory: set[int] = set()  # blocks that a worker has memory for
    running: list[list[Any]] = []
    for step in range(2000):
        with backed.deciding() as share:
            new: list[Any] = []
            for _ in range(rng.randrange(3)):
                count = rng.randrange(1, 5)
                if count <= pool.get_num_free_blocks():
                    taken = pool.get_new_blocks(count)
                    running.append(taken)
                    new += taken
            cached = [block for block in pool.blocks if block.block_hash is not None]
            if cached and rng.random() < 0.3:
                block = rng.choice(cached)
                if block.ref_cnt or pool.get_num_free_blocks():
                    assert block.block_id in memory, "the prefix cache finds memory that is gone"
                    pool.touch([block])
                    running.append([block])
                    new.append(block)
            gone = backed.decide([block.block_id for block in new], ended=True, idle=not running, share=share)
        assert not {block.block_id for row in running for block in row} & set(gone)
        memory.difference_update(gone)
        memory.update(block.block_id for block in new)
        assert not limited or len(memory) + shows_null <= most
        assert memory == backed._backed
        while running and rng.random() < 0.5:
            row = running.pop(rng.randrange(len(running)))
            for block in row:
                if block.block_hash is None and block.ref_cnt == 1 and rng.random() < 0.7:
                    pool._insert_block_hash(f"{step}-{block.block_id}".encode() + bytes(4), block, num_tokens=16)
            pool.free_blocks(row)
