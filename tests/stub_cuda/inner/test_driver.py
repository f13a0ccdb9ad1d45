"""The cuda driver: what it asks of CUDA, what it says when something is missing, and that it leaves threads as it found
them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch

import vattn
from bench.gpu.parts.calls import PAPER
from stub_cuda import Stub
from tests.support import forks, scripts
from vattn import _native, drivers
from vattn.config import resolve
from vattn.doctor import doctor
from vattn.drivers import cuda

BASE: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
    "max_batch_size": 2,
    "max_context_len": 20_000,
    "device": "cuda",
    "memory_budget": "48MiB",
    "layout": "layer",
}


def find(name: str = "cuda") -> cuda.CudaDevice:
    device = drivers.find(name)
    assert isinstance(device, cuda.CudaDevice)
    return device


# What is there


def test_a_device_as_cuda_describes_it(stub: Stub) -> None:
    device = find()
    assert device is find("cuda:0")
    assert device.granularity == 2**21
    assert device.page_sizes == tuple(2**21 * pages for pages in range(1, 33))
    assert device.available_memory() == 2**30
    assert device.mapping_limit() is None
    # CUmemAllocationProp: pinned, no handles, location (device, 0), and zeros
    assert device._prop == (1).to_bytes(4, "little") + bytes(4) + (1).to_bytes(4, "little") + bytes(20)
    assert set(device.table()) == set(_native.table_names())
    second = find("cuda:1")
    assert second._prop[12] == 1
    assert second.torch_device == torch.device("cuda:1")


def test_the_primary_context_is_retained_once(stub: Stub) -> None:
    find()
    before = stub.calls("cuDevicePrimaryCtxRetain")
    for _ in range(3):
        with vattn.KVCache(vattn.KVConfig(**BASE)):
            pass
    assert stub.calls("cuDevicePrimaryCtxRetain") == before
    assert stub.calls("cuDevicePrimaryCtxRelease") == 0


def test_a_cache_on_cuda(stub: Stub) -> None:
    with vattn.KVCache(vattn.KVConfig(**BASE)) as cache:
        assert (cache.layout.page_size, cache.layout.kv_order, cache.layout.name) == (2**21, "NHD", "layer")
        reqid = cache.alloc_reqid()
        cache.step({reqid: 9000})
        k, v = cache.layer(1)
        k[reqid, :9000], v[reqid, :9000] = 1, 2
        assert (k[reqid, :9000].sum(), v[reqid, 8999].sum()) == (9000 * 128, 256)
        cache.check()


def test_calls_are_batched_and_access_is_set_once_per_contiguous_range(stub: Stub) -> None:
    with vattn.KVCache(vattn.KVConfig(**BASE, eager_pages=0, overlap=False)) as cache:
        stub.logging(True)
        cache.step({cache.alloc_reqid(): 20_000})
        log = stub.log("cuMemCreate", "cuMemMap", "cuMemSetAccess")
        stub.logging(False)
    assert [line.split()[0] for line in log] == 12 * ["cuMemCreate"] + 4 * [*(3 * ["cuMemMap"]), "cuMemSetAccess"]
    for at in range(12, len(log), 4):
        (_, first, *_), (_, address, size) = log[at].split(), log[at + 3].split()
        assert (address, size) == (first, str(3 * 2**21))


def test_pages_are_unmapped_one_by_one(stub: Stub) -> None:
    """cuMemUnmap's documentation allows one whole mapping per call; the stub refuses more."""
    with vattn.KVCache(vattn.KVConfig(**BASE, eager_pages=0, watermark=0)) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 20_000})
        cache.free_reqid(reqid)
        before = stub.calls("cuMemUnmap")
        assert cache.trim() == 12 * 2**21
        assert stub.calls("cuMemUnmap") - before == 12


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_pages_are_multiples_of_the_granularity(stub: Stub, pages: int) -> None:
    config = BASE | {"page_size": pages * 2**21, "memory_budget": "144MiB"}
    with vattn.KVCache(vattn.KVConfig(**config)) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 20_000})
        k, _ = cache.layer(0)
        k[reqid] = 3
        cache.check()


@pytest.mark.parametrize("page_size", [2**16, 2**20, 3 * 2**20])
def test_other_pages_are_refused(stub: Stub, page_size: int) -> None:
    with pytest.raises(vattn.ConfigError, match=r"multiples of 2097152 \(2.0 MiB\)"):
        vattn.KVCache(vattn.KVConfig(**BASE | {"page_size": page_size}))
    with pytest.raises(vattn.ConfigError, match="multiples of 2097152"):
        vattn.PagePool("64MiB", device="cuda", page_size=page_size)


def test_a_pool_takes_cudas_pages_by_itself(stub: Stub) -> None:
    pool = vattn.PagePool("48MiB", device="cuda:0")
    assert pool.page_size == 2**21
    with vattn.KVCache(vattn.KVConfig(**BASE), pool=pool) as cache:
        assert cache.total_pages == 24
    with pytest.raises(vattn.ConfigError, match="the pool is on cuda:0, not on cuda:1"):
        vattn.KVCache(vattn.KVConfig(**BASE | {"device": "cuda:1"}), pool=pool)
    pool.close()


def test_an_automatic_budget_is_a_share_of_the_free_memory(stub: Stub) -> None:
    stub.memory(2**26)
    # No pages in the background: what is free must not change between the two caches.
    auto = BASE | {"memory_budget": "auto", "max_context_len": 200_000, "eager_pages": 0, "overlap": False}
    with vattn.KVCache(vattn.KVConfig(**auto)) as cache:
        assert cache.total_pages == int(0.9 * 2**26) // 2**21
        assert (
            str(cache.capacity())
            == "56.0 MiB hold 57,344 tokens: of up to 2 requests at a time, of up to 57,344 tokens; layout layer, "
            "pages of 2.0 MiB for 8,192 tokens, of which a request leaves 4.0 MiB unused on average"
        )
        cache.step({cache.alloc_reqid(): 40_000})
        # What another cache holds, or a model's weights, is not free any more.
        free = 2**26 - cache.stats().created_pages * 2**21
        with vattn.KVCache(vattn.KVConfig(**auto, memory_utilization=0.75)) as second:
            assert second.total_pages == int(0.75 * free) // 2**21


def test_the_doctor_says_what_it_finds(stub: Stub) -> None:
    text = doctor()
    assert "cuda   ok: a driver for CUDA 13.0" in text
    assert "cuda:1 Stub GPU 1, 1.0 GiB; shared pages are mapped read-only" in text


REFUSED = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
import stub_cuda, vattn
stub_cuda.stand_in()
control, prompt = stub_cuda.Stub(), list(range(5000))  # a block of 4096 tokens, and a part of one
cache = vattn.KVCache(vattn.KVConfig(
    num_layers=1, num_kv_heads=1, head_dim=128, dtype="float32", max_batch_size=3, max_context_len=8192, device="cuda",
    memory_budget="32MiB", layout="layer", eager_pages=0))
first, _ = cache.admit(prompt)
cache.step({first: 5000})
k, v = cache.layer(0)
k[first, :5000] = v[first, :5000] = 1
cache.commit(first, prompt)
second, cached = cache.admit(prompt)
cache.step({second: 5000})
cache.check()
print(cached, cache.stats().shared_pages, cache.stats().shared_read_only)
cache.step({second: 4000})  # below the block, which the other keeps
cache.step({second: 4001})
k[second, 4000] = v[second, 4000] = 2
print(k[first, 4000, 0, 0].item(), k[second, 3999, 0, 0].item(), cache.stats().shared_pages)
cache.check()
del k, v
cache.close()
from vattn.doctor import doctor
print(*(line.strip() for line in doctor().splitlines() if "cuda:0" in line))
print(control.usage().memory, control.violations())
"""


def test_pages_are_shared_by_writable_mappings_if_the_driver_has_no_others(stub: Stub) -> None:
    done = scripts.over_stub(REFUSED, read_only=0, devices=1)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "WARNING cuda:0 maps no memory read-only: shared pages are writable in every slot that has them, so a stray "
        "write to one does not fault",
        "4096 2 False",
        "1.0 1.0 0",
        "cuda:0 Stub GPU 0, 1.0 GiB; no read-only mappings: shared pages are writable in every slot that has them, so "
        "a stray write to one does not fault",
        "(0, 0, 0, 0) []",
    ]


# Layouts


@pytest.mark.parametrize(
    ("slots", "budget", "layout", "mib", "page_tokens"),
    [
        (8, "16GiB", "sliced", 8, 128),
        (64, "16GiB", "sliced", 8, 128),
        (64, "4GiB", "sliced", 4, 64),
        (1024, "32GiB", "sliced", 2, 32),
        (1024, "20GiB", "fused", 2, 16),
        (1024, "2GiB", "fused", 2, 16),
    ],
)
def test_auto_leaves_a_sixteenth_of_the_budget_in_last_blocks(
    slots: int, budget: str, layout: str, mib: int, page_tokens: int
) -> None:
    """Llama-3-8B; a request leaves half a page unused per tensor on average."""
    shape = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "device": "cuda"}
    config = vattn.KVConfig(**shape, max_batch_size=slots, max_context_len=16_384, memory_budget=budget)
    made, _ = resolve(config)
    assert (made.name, made.page_size, made.page_tokens) == (layout, mib << 20, page_tokens)


@pytest.mark.parametrize(
    ("layers", "heads", "mib", "block_tokens"),
    [(36, 8, 18, 256), (80, 8, 20, 128), (92, 8, 46, 256), (61, 8, 2, 512), (94, 4, 2, 512), (28, 8, 14, 256)],
)
def test_blocks_are_short_where_rows_are_no_power_of_two(layers: int, heads: int, mib: int, block_tokens: int) -> None:
    """Prefixes are shared in blocks of whole pages: Qwen3-8B, Llama-3-70B, GLM-4.5, ..."""
    shape = {"num_layers": layers, "num_kv_heads": heads, "head_dim": 128, "dtype": "bfloat16", "device": "cuda"}
    made, _ = resolve(vattn.KVConfig(**shape, max_batch_size=16, max_context_len=32_768, memory_budget="60GiB"))
    assert (made.page_size, made.bands[0].block_tokens) == (mib << 20, block_tokens)


@pytest.mark.parametrize("layers", [32, 36, 61])
def test_pages_are_no_longer_than_short_contexts(layers: int) -> None:
    shape = {"num_layers": layers, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "device": "cuda"}
    made, _ = resolve(vattn.KVConfig(**shape, max_batch_size=16, max_context_len=16, memory_budget="16GiB"))
    assert made.pages(16) * made.page_size <= 4 << 20


@pytest.mark.parametrize(
    ("options", "layout", "mib", "page_tokens"),
    [
        ({"block_tokens": 1024, "page_size": 2**21}, "layer", 2, 1024),
        ({"block_tokens": 512, "layout": "sliced"}, "sliced", 32, 512),
        ({"block_tokens": 100}, "sliced", 6, 96),
    ],
)
def test_block_tokens_are_the_most_that_a_page_covers(
    options: dict[str, Any], layout: str, mib: int, page_tokens: int
) -> None:
    shape = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "device": "cuda"}
    config = vattn.KVConfig(**shape, **options, max_batch_size=4, max_context_len=16_384, memory_budget="40GiB")
    made, _ = resolve(config)
    assert (made.name, made.page_size, made.page_tokens) == (layout, mib << 20, page_tokens)


@pytest.mark.parametrize(("layout", "mib"), [("layer", 2), ("sliced", 8), ("fused", 16)])
def test_pages_cover_128_tokens_in_every_layout(layout: str, mib: int) -> None:
    shape = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "device": "cuda"}
    config = vattn.KVConfig(**shape, max_batch_size=8, max_context_len=16_384, memory_budget="64GiB", layout=layout)
    assert resolve(config)[0].page_size == mib << 20


# Threads


def test_the_callers_context_stays_current(stub: Stub) -> None:
    """A cache on one device, used by a thread whose current context is another's, as with two GPUs in torch."""
    library = ctypes.CDLL("libcuda.so.1")
    mine, now = int(find("cuda:1")._context), ctypes.c_void_p()
    for context in (mine, None):
        assert library.cuCtxSetCurrent(ctypes.c_void_p(context)) == 0
        with vattn.KVCache(vattn.KVConfig(**BASE)) as cache:
            for _ in range(2):
                reqid = cache.alloc_reqid()
                cache.step({reqid: 9000})
                cache.free_reqid(reqid)
                cache.check()
                cache.trim()
            library.cuCtxGetCurrent(ctypes.byref(now))
            assert now.value == context
        library.cuCtxGetCurrent(ctypes.byref(now))
        assert now.value == context
    mode = ctypes.c_uint(0)
    library.cuCtxSetCurrent(ctypes.c_void_p(mine))
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0


# What fails


SETUP = [
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
]
FRESH = """
import stub_cuda, vattn
from vattn import drivers
stub_cuda.stand_in()
control = stub_cuda.Stub()
def attempt(device="cuda"):
    try:
        drivers.find(device).available_memory()
    except vattn.VattnError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("fine")
"""


@pytest.mark.parametrize("call", SETUP)
def test_every_call_of_the_setup_can_fail_and_be_tried_again(call: str) -> None:
    done = scripts.over_stub(FRESH + f"drivers.cuda.start(); control.fail({call!r}, 1, 46); attempt(); attempt()")
    assert done.stdout == f"DriverError: {call} failed with CUDA_ERROR_DEVICE_UNAVAILABLE (46)\nfine\n", done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"init": 100}, ("finds no GPU", "CUDA_ERROR_NO_DEVICE (100)")),
        ({"devices": 0}, ("finds no GPU",)),
        ({"init": 803}, ("does not start", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)")),
        ({"version": 11080}, ("for CUDA 11.8, too old", "12.0")),
        ({"vmm": 0}, ("Stub GPU 0", "no virtual memory management")),
    ],
)
def test_what_is_missing_is_said(options: dict[str, int], says: tuple[str, ...]) -> None:
    done = scripts.over_stub(FRESH + "attempt(); from vattn.doctor import doctor; print(doctor())", **options)
    assert done.stdout.startswith("ConfigError: "), done.stdout + done.stderr
    for words in says:
        assert words in done.stdout.splitlines()[0]


def test_a_device_that_is_not_there(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(
        vattn.ConfigError, match=r"'cuda:2' does not exist; CUDA has 2 here \(CUDA_VISIBLE_DEVICES='0,1'"
    ):
        drivers.find("cuda:2")


def test_cuda_python_is_missing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(vattn.ConfigError, match=r"cuda-python is not installed .*pip install 'vattn\[cuda\]'"):
        drivers.find("cuda")


def test_a_torch_without_cuda(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "torch_lacks", lambda: "torch is built without CUDA")
    with pytest.raises(vattn.ConfigError, match="torch is built without CUDA"):
        drivers.find("cuda")


def test_a_fork_is_told_that_cuda_does_not_survive_it(stub: Stub) -> None:
    cache = vattn.KVCache(vattn.KVConfig(**BASE))

    def child() -> None:
        for call in (lambda: cache.step({}), lambda: drivers.find("cuda")):
            with pytest.raises(vattn.ForkedProcess, match="spawn"):
                call()

    assert forks.status(child) == 0
    cache.check()
    cache.close()


@pytest.mark.parametrize(
    ("call", "code", "name"),
    [
        ("cuMemMap", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuMemSetAccess", 4, "CUDA_ERROR_DEINITIALIZED"),
        ("cuMemCreate", 12_345, "an unknown result"),
    ],
)
def test_errors_carry_cudas_name_number_and_call(stub: Stub, call: str, code: int, name: str) -> None:
    with vattn.KVCache(vattn.KVConfig(**BASE, eager_pages=0, overlap=False)) as cache:
        reqid = cache.alloc_reqid()
        stub.fail(call, 2, code)
        with pytest.raises(vattn.DriverError) as caught:
            cache.step({reqid: 9000})
        assert (caught.value.call, caught.value.code, caught.value.name) == (call, code, name)
        assert f"{call} failed with {name} ({code})" in str(caught.value)
        cache.check()
        cache.step({reqid: 9000})


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"])
def test_a_worker_that_cannot_take_the_context(stub: Stub, call: str) -> None:
    find()
    pools = []
    for nth in (1, 2, 3):  # whichever of the calls is the worker's
        stub.fail(call, nth, 201)
    pools.append(vattn.PagePool("48MiB", device="cuda"))
    transaction_fails = False
    with pools[0]._core.lock:
        try:
            pools[0]._core.execute(lambda change: change.transaction.wait_for(None))
        except vattn.DriverError as error:
            transaction_fails = error.call == call
    stub.heal()
    assert transaction_fails
    pools[0].close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_exhausted_memory_names_the_device(stub: Stub, call: str) -> None:
    with vattn.KVCache(vattn.KVConfig(**BASE, eager_pages=0, overlap=False)) as cache:
        reqid = cache.alloc_reqid()
        if call == "cuMemCreate":
            stub.memory(8 * 2**20)
        else:
            stub.fail(call, 1, 2)
        with pytest.raises(vattn.OutOfPages, match="on cuda:0, although the budget of 24 pages does") as caught:
            cache.step({reqid: 20_000})
        assert not isinstance(caught.value, vattn.MappingLimit)
        assert isinstance(caught.value.__cause__, vattn.DriverError)
        assert caught.value.__cause__.call == call
        cache.check()
        stub.memory(2**30)
        cache.step({reqid: 20_000})


def test_exhausted_memory_while_a_stream_captures(stub: Stub) -> None:
    captured = stub.stream()
    with vattn.KVCache(vattn.KVConfig(**BASE, eager_pages=0, overlap=False)) as cache:
        reqid = cache.alloc_reqid()
        stub.memory(8 * 2**20)
        stub.capture(captured, True)
        with pytest.raises(vattn.OutOfPages, match=r"8\.0 MiB available"):
            cache.step({reqid: 20_000}, stream=stub.stream())
        assert stub.capture(captured, False) == 0


@pytest.fixture
def unused(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that torch's allocator keeps of the device's memory, which is 1 GiB."""
    kept: list[int] = []

    def give_back() -> None:
        kept.clear()
        stub.memory(2**30)

    monkeypatch.setattr(cuda, "unused_by_torch", lambda device: sum(kept))
    monkeypatch.setattr(cuda, "empty_cache", give_back)
    kept.append(2**30 - 8 * 2**20)
    stub.memory(8 * 2**20)
    return kept


@pytest.mark.parametrize("takes", [True, False])
def test_memory_that_torch_keeps_unused(stub: Stub, unused: list[int], takes: bool) -> None:
    """It is taken for pages if the pool's owner wants that, before cached blocks are, and otherwise named."""
    pool = vattn.PagePool("48MiB", device="cuda")
    pool._core.takes_unused = takes
    with vattn.KVCache(vattn.KVConfig(**BASE, eager_pages=0, overlap=False), pool=pool) as cache:
        reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
        cache.step({other: 1})
        cache.free_reqid(other)  # which leaves parked pages
        cache.check()
        if takes:
            cache.step({reqid: 20_000})
            assert not unused
            assert cache.stats().parked_pages
        else:
            with pytest.raises(vattn.OutOfPages, match=r"\(and 1016.0 MiB that torch's allocator keeps: torch"):
                cache.step({reqid: 20_000})
            assert unused
        cache.check()
    pool.close()


def test_memory_that_torch_keeps_unused_stays_there_while_a_stream_captures(stub: Stub, unused: list[int]) -> None:
    pool, captured = vattn.PagePool("48MiB", device="cuda"), stub.stream()
    pool._core.takes_unused = True
    with vattn.KVCache(vattn.KVConfig(**BASE, eager_pages=0, overlap=False), pool=pool) as cache:
        reqid = cache.alloc_reqid()
        stub.capture(captured, True)
        with pytest.raises(vattn.OutOfPages):
            cache.step({reqid: 20_000}, stream=stub.stream())
        assert unused
        assert stub.capture(captured, False) == 0
        cache.step({reqid: 20_000})
        assert not unused
    pool.close()


def test_latencies_of_the_paper_are_hidden_by_overlap(stub: Stub) -> None:
    """The stub's calls take as long as the paper measured: a step that crosses into a mapped block waits for none."""
    stub.latencies(PAPER)
    with vattn.KVCache(vattn.KVConfig(**BASE, eager_pages=0)) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 8191})
        cache.step({reqid: 8192})  # the last token of a page: the next is queued
        cache.check()
        waits = cache.stats().waits
        cache.step({reqid: 8193})
        assert cache.stats().waits == waits
        seconds = cache.stats().calls["cuMemSetAccess"].seconds
        assert seconds >= cache.stats().calls["cuMemSetAccess"].count * 38e-6
