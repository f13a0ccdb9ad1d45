"""`vattn pool`: what an operator sees of a pool, and what they change."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import vattn
from tests.support import brokers
from tests.support.waiting import SECONDS, wait_until
from vattn.broker.places import folder, socket_path
from vattn.broker.wire import VERSION, encode
from vattn.engine.cli import main

PAGE = 4096
TOKENS = 16  # of a page
POOL = 2**20
SIZE = r"[\d.]+ [KM]?i?B"

Said = Callable[..., str]


@pytest.fixture
def broker() -> Iterator[brokers.Process]:
    with brokers.running(POOL) as process:
        yield process


@pytest.fixture
def a(broker: brokers.Process) -> Iterator[vattn.PagePool]:
    """A borrower of this name."""
    pool = vattn.PagePool.connect(brokers.NAME, label="a", page_size=PAGE)
    yield pool
    pool.close()


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command of `vattn pool` prints."""

    def said(*words: str, status: int = 0) -> str:
        assert main(["pool", *words]) == status
        return capsys.readouterr().out

    return said


def cache(pool: vattn.PagePool) -> vattn.KVCache:
    shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32}
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_context_len": 64 * TOKENS, "layout": "layer"}
    return vattn.KVCache(vattn.KVConfig(**shape, **sizes, watermark=0), pool=pool)


def test_top(a: vattn.PagePool, said: Said) -> None:
    title, empty, header, row = said("top", brokers.NAME, "--once").splitlines()
    assert re.fullmatch(rf"tested on cpu: 1.0 MiB, {SIZE} free", title)  # engines are lent some before they ask
    assert not empty
    assert header.split()[:2] == ["borrower", "guaranteed"]
    assert row.split()[:5] == ["a", "0", "B", "1.0", "MiB"]
    assert len(said("top", brokers.NAME).splitlines()) == 4, "once, where it is no terminal"
    top = json.loads(said("top", brokers.NAME, "--json"))
    assert (top["pool"], top["device"], top["budget"]) == ("tested", "cpu", POOL)
    assert [(each["name"], each["at_most"], each["lost"]) for each in top["borrowers"]] == [("a", POOL, False)]


def test_limits(broker: brokers.Process, a: vattn.PagePool, said: Said, refuses: Callable[..., None]) -> None:
    def limits() -> tuple[int, int]:
        found = broker.borrower("a")
        assert found is not None
        return found["at_least"], found["at_most"]

    row = said("limit", brokers.NAME, "a", "--at-most", "512KiB").splitlines()[-1]
    assert row.split()[:5] == ["a", "0", "B", "512.0", "KiB"]
    assert limits() == (0, 2**19)
    said("limit", brokers.NAME, "a", "--at-least", "256KiB")
    assert limits() == (2**18, 2**19)
    said("limit", brokers.NAME, "a", "--at-least", "0", "--at-most", "1MiB")
    assert limits() == (0, 2**20)
    refuses(["pool", "limit", brokers.NAME, "a"], "give --at-least, --at-most or both")
    refuses(["pool", "limit", brokers.NAME, "b", "--at-most", "1MiB"], "'b' borrows nothing of the pool 'tested'")
    refuses(["pool", "limit", brokers.NAME, "a", "--at-most", "some"], "--at-most")
    assert limits() == (0, 2**20)


def test_trim_takes_what_is_unused_and_evict_cached_prefixes_too(
    broker: brokers.Process, a: vattn.PagePool, said: Said
) -> None:
    def of_a(what: str) -> int:
        found = broker.borrower("a")
        assert found is not None
        return int(found[what])

    def taken(*words: str) -> None:
        """Asks again: pages of which the worker still maps or unmaps some are not taken back while it does."""
        assert re.fullmatch(rf"{SIZE} given back; {SIZE} free\n", said(*words))

    with cache(a) as kv:
        prompt = list(range(10 * TOKENS))
        slot, _ = kv.admit(prompt)
        other = kv.alloc_reqid()
        kv.step({slot: len(prompt), other: 20 * TOKENS})
        kv.commit(slot, prompt)
        for each in (slot, other):
            kv.free_reqid(each)
        kv.step({})
        wait_until(lambda: of_a("parked") > 0 and of_a("cached") == 20 * PAGE)

        def trimmed(*model: str) -> bool:
            taken("trim", brokers.NAME, *model)
            return of_a("parked") == 0

        wait_until(trimmed)
        wait_until(lambda: trimmed("--model", "a"))
        kv.check()
        assert kv.stats().cached_pages == 20

        def evicted() -> bool:
            taken("evict", brokers.NAME, "--model", "a")
            return of_a("cached") == 0

        wait_until(evicted)
        kv.check()
        assert kv.stats().cached_pages == 0


def test_check(broker: brokers.Process, a: vattn.PagePool, said: Said) -> None:
    assert said("check", brokers.NAME) == "books and kernel agree\n"
    with socket.socket(socket.AF_UNIX) as borrower:
        borrower.settimeout(SECONDS)
        memory = os.memfd_create("a borrower", os.MFD_ALLOW_SEALING)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        os.pwrite(memory, bytes(2 * PAGE), 0)  # without a lease
        borrower.connect(str(socket_path(brokers.NAME)))
        told = {"version": VERSION, "identity": "x", "name": "b", "device": "cpu", "page": PAGE}
        socket.send_fds(borrower, [encode("join", **told, at_least=0, at_most=None, lease=0)], [memory])
        os.close(memory)
        assert borrower.recv(2**16)
        assert said("check", brokers.NAME, status=1) == f"b has {2 * PAGE} bytes and a lease of 0\n"


def test_the_list_of_pools(broker: brokers.Process, a: vattn.PagePool, said: Said) -> None:
    assert re.fullmatch(rf"tested: 1.0 MiB on cpu, {SIZE} free; borrowed by a\n", said("list"))
    broker.kill()
    assert said("list") == "tested: its broker has ended\n"
    socket_path(brokers.NAME).unlink()
    assert said("list") == f"no pools in {folder()}\n"


@pytest.mark.parametrize("words", [["top"], ["limit", "a", "--at-most", "1MiB"], ["trim"], ["evict"], ["check"]])
def test_a_pool_that_nobody_serves(
    words: list[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch, refuses: Callable[..., None]
) -> None:
    monkeypatch.setenv("VATTN_POOL_DIR", f"{tmp_path}/pools")
    refuses(["pool", words[0], "none", *words[1:]], "no broker serves the pool 'none'; vattn pool serve none --budget")
