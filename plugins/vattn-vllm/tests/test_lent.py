"""What a broker lends an engine: decisions keep to it, and memory goes to who needs it when workers have let it go."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pools import NAME, Pool, serving_pool, wait_until
from vattn_vllm.hooks import _Backed
from vattn_vllm.lent import LentBlocks
from vattn_vllm.options import Options
from vllm.v1.core.block_pool import BlockPool

from vattn.errors import ConfigError

BLOCK = 3 * 2**16  # bytes; no power of two
BLOCKS = 40


def options(**given: Any) -> Options:
    return Options.of(SimpleNamespace(additional_config={"vattn": given}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"kv_pool": "a/b"}, "kv_pool is 'a/b'"),
        ({"kv_share": "at most 1GiB"}, "name the pool too"),
        ({"kv_pool": "a", "kv_share": "1GiB"}, "give text such as 'at least 4GiB, at most 40GiB'"),
        ({"shared_budget": "chat:4GiB"}, "vattn pool serve NAME --budget SIZE"),
    ],
)
def test_what_is_no_share_of_a_pool(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        options(**given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"guard": "loose"}, "guard='loose' is not 'zero' or 'strict'"),
        ({"guard": None}, "guard=None is not 'zero' or 'strict'"),
        ({"spare_windows": -1}, "spare_windows=-1 must be 0 or more"),
        ({"spare_windows": True}, "spare_windows=True must be 0 or more"),
        ({"spare_windows": 1.0}, r"spare_windows=1\.0 must be 0 or more"),
        ({"keep_cached": True}, "keep_cached=True is a share of the blocks, from 0 to 1"),
        ({"keep_cached": -0.1}, r"keep_cached=-0\.1 is a share of the blocks, from 0 to 1"),
        ({"keep_free": "0.5"}, r"keep_free='0\.5' is a share of the blocks, from 0 to 1"),
    ],
)
def test_values_that_an_option_cannot_have(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        options(**given)


@pytest.mark.parametrize("given", [5, "keep_free", ["keep_free"], None])
def test_options_that_are_no_object(given: object) -> None:
    with pytest.raises(ConfigError, match=r'has "vattn": .*; give an object of options'):
        Options.of(SimpleNamespace(additional_config={"vattn": given}))  # type: ignore[arg-type]


def test_an_engine_without_options_has_the_usual_ones() -> None:
    for additional in ({}, {"another": {"page": 1}}, None, object()):
        assert Options.of(SimpleNamespace(additional_config=additional)) == Options()  # type: ignore[arg-type]


def lent(name: str, share: str | None = None, **given: int) -> LentBlocks:
    sizes = {"block_bytes": BLOCK, "blocks": BLOCKS, "longest": 4, **given}
    return LentBlocks(NAME, share, name=name, device="cpu", **sizes)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with serving_pool(18 * BLOCK) as pool:
        yield pool
        assert pool.ask("check")["problems"] == []


def take(blocks: LentBlocks, count: int) -> bool:
    """Has so many blocks in a step that ends; False if that is not lent."""
    with blocks.deciding(0, count) as most:
        if most < count:
            return False
        blocks.decided(count, parked=0, cached=0, oldest=None)
    blocks.ended()
    return True


def test_what_no_engine_can_get_is_refused_when_it_starts(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="one request of max_model_len needs"):
        lent("a", longest=19)
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        lent("a", f"at most {4 * BLOCK}B", longest=5)
    wait_until(lambda: not pool.of("a"))


def test_memory_counts_until_the_step_that_gives_it_back_has_ended(pool: Pool) -> None:
    # Engines keep a chunk ahead of need, except from a request that cannot be served without it.
    a, b = lent("a", longest=18), lent("b", longest=10)
    wait_until(lambda: take(a, 18))
    woken: list[int] = []
    a.wake = lambda: woken.append(1)
    with a.deciding(18, 0):
        a.decided(18, parked=0, cached=10, oldest=1)  # a step that runs meanwhile
    wait_until(lambda: take(b, 1) or a.asks)
    assert woken
    level, with_cached = a.wanted
    assert with_cached
    assert level < 18
    with a.deciding(18, 0):
        a.decided(8, parked=0, cached=0, oldest=None)
    assert not a.asks, "a step is on its way that gives it back"
    a.ended()
    assert not take(b, 10), "the workers still have the memory"
    a.ended()
    wait_until(lambda: take(b, 10))
    assert 8 * BLOCK <= pool.of("a")["lease"] <= 9 * BLOCK
    assert not take(b, 11)
    a.close()
    wait_until(lambda: take(b, 18))
    b.close()


def test_one_step_answers_what_the_broker_asks(pool: Pool) -> None:
    mine = lent("mine")
    wait_until(lambda: take(mine, 18))
    for stage, level in ("parked", 12 * BLOCK), ("cached", 8 * BLOCK):
        assert mine.come_down(level, stage) is None
        assert mine.asks
        assert mine.wanted == (level // BLOCK, stage == "cached")
        with mine.deciding(18, 0):
            mine.decided(level // BLOCK, parked=0, cached=0, oldest=None)
        assert not mine.asks
        assert mine.wanted == (BLOCKS, False), "later steps decide as they like"
        assert mine.come_down(level, stage) is None, "the workers still have it"
        mine.ended()
        assert mine.come_down(level, stage) == level
    mine.close()


OTHER = f"""
import sys
from vattn_vllm.lent import LentBlocks
blocks = LentBlocks({NAME!r}, None, name="other", device="cpu", block_bytes={BLOCK}, blocks=40, longest=4)
most = 0
while most < 18:
    with blocks.deciding(0, 18) as most:
        blocks.decided(min(most, 18), parked=0, cached=0, oldest=None)
    blocks.ended()
print("READY", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_engine_had_is_the_others(pool: Pool) -> None:
    mine = lent("mine")
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"READY\n"
        assert not take(mine, 1)
        other.send_signal(signal.SIGKILL)
    wait_until(lambda: take(mine, 18))
    mine.close()


def test_an_engine_goes_on_without_a_broker_and_joins_the_next(pool: Pool) -> None:
    mine = lent("mine")
    wait_until(lambda: take(mine, 6))
    pool.kill()
    wait_until(lambda: not mine._borrower.reachable)
    assert take(mine, 6)
    assert not take(mine, 18)
    pool.start()
    wait_until(lambda: take(mine, 18))
    mine.close()


def test_limits_are_live(pool: Pool) -> None:
    mine = lent("mine", f"at least {2 * BLOCK}B, at most {12 * BLOCK}B")
    wait_until(lambda: take(mine, 12))
    assert not take(mine, 13)
    pool.ask("limit", name="mine", at_least=None, at_most=5 * BLOCK)

    def most() -> int:
        with mine.deciding(12, 0) as blocks:
            mine.decided(12, parked=0, cached=0, oldest=None)
        mine.ended()
        return blocks

    wait_until(lambda: most() == 5)
    assert take(mine, 5)
    wait_until(lambda: pool.of("mine")["lease"] == 5 * BLOCK)
    mine.close()


class Engine:
    """vLLM's own block pool, and what a worker has memory for: random requests, in steps that end later."""

    def __init__(self, rng: random.Random, lent: LentBlocks | None, keep: float, *, shows_null: bool) -> None:
        self.rng, self.lent, self.shows_null = rng, lent, shows_null
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
        self.backed = _Backed(
            self.pool, options(keep_free=keep / 3, keep_cached=keep), lent=lent, shows_null=shows_null
        )
        self.memory: set[int] = set()  # blocks that a worker has memory for
        self.steps: deque[tuple[list[int], set[int]]] = deque()  # what is given back, and what gets memory
        self.running: list[list[Any]] = []
        self.number = 0

    @property
    def held(self) -> int:
        return len(self.memory) + (self.shows_null and bool(self.memory))

    def step(self, calm: bool) -> None:
        rng, pool, self.number = self.rng, self.pool, self.number + 1
        with self.backed.deciding(lambda: (0, 0) if calm else (9, 9)):
            new: list[Any] = []
            for _ in range(0 if calm else rng.randrange(3)):
                count = rng.randrange(1, 5)
                if count <= pool.get_num_free_blocks():
                    taken = pool.get_new_blocks(count)
                    self.running.append(taken)
                    new += taken
            cached = [block for block in pool.blocks if block.block_hash is not None]
            if cached and not calm and rng.random() < 0.3:
                block = rng.choice(cached)
                if block.ref_cnt or pool.get_num_free_blocks():
                    assert block.block_id in self.backed._backed, "the prefix cache finds memory that is gone"
                    pool.touch([block])
                    self.running.append([block])
                    new.append(block)
            idle = not self.running
            gone = self.backed.decide([block.block_id for block in new], ended=True, idle=idle)
        assert not {block.block_id for row in self.running for block in row} & set(gone)
        self.steps.append((gone, {block.block_id for block in new}))
        while self.steps and (len(self.steps) > 1 or rng.random() < 0.7):
            self.end()
        while self.running and rng.random() < (0.9 if calm else 0.5):
            row = self.running.pop(rng.randrange(len(self.running)))
            for block in row:
                if block.block_hash is None and block.ref_cnt == 1 and rng.random() < 0.7:
                    key = f"{self.number}-{block.block_id}".encode() + bytes(4)
                    pool._insert_block_hash(key, block, num_tokens=16)
            pool.free_blocks(row)

    def end(self) -> None:
        """A worker executes the earliest step."""
        gone, new = self.steps.popleft()
        self.memory.difference_update(gone)
        self.memory.update(new)
        if not self.steps:
            assert self.memory == self.backed._backed
        self.backed.ended()


@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shows_null", [False, True])
def test_random_requests_lose_no_contents(keep: float, shows_null: bool) -> None:
    """What is backed, what a block holds, and what vLLM's block pool believes."""
    engine = Engine(random.Random(4), None, keep, shows_null=shows_null)
    for number in range(1000):
        engine.step(calm=number % 100 < 20)


@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shows_null", [False, True])
def test_engines_never_exceed_their_pool_and_whoever_is_busy_gets_most_of_it(
    keep: float, shows_null: bool, pool: Pool
) -> None:
    engines = [Engine(random.Random(i), lent(f"engine-{i}"), keep, shows_null=shows_null) for i in range(2)]

    def step(resting: Engine | None) -> None:
        for engine in engines:
            engine.step(calm=engine is resting)
            assert sum(each.held for each in engines) <= 18

    for turn in range(4):
        busy, other = engines[turn % 2], engines[(turn + 1) % 2]
        for _ in range(50):
            step(None)

        def has_most(busy: Engine = busy, other: Engine = other) -> bool:
            step(other)
            return busy.held > 12

        wait_until(has_most)
    for engine in engines:
        engine.backed.close()


def test_the_name_of_an_engine_is_its_models(pool: Pool) -> None:
    first, second = lent("model"), lent("model")
    wait_until(lambda: pool.of("model") and pool.of("model#2"))
    first.close()
    second.close()
