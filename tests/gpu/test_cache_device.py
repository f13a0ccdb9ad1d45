"""A cache on a GPU: tensors over unmapped addresses, fences, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from tests.support.exports import export
from vattn.drivers import cuda
from vattn.pool import leftovers

TOKENS = 4096  # per 2 MiB page: one layer, one head of 128 float32 in K and V each
BASE: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_dim": 128,
    "dtype": "float32",
    "max_batch_size": 3,
    "max_context_len": 8 * TOKENS,
    "device": "cuda",
    "page_size": 2**21,
    "memory_budget": 16 * 2**21,
    "layout": "layer",
    "eager_pages": 0,
    "watermark": 0,
}


def make(**changes: Any) -> vattn.KVCache:
    return vattn.KVCache(vattn.KVConfig(**BASE | changes))


@pytest.mark.parametrize("layout", ["layer", "sliced", "fused"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_tokens_survive_growth(layout: str, order: str) -> None:
    with make(layout=layout, kv_order=order, num_layers=2, num_kv_heads=2, memory_budget="512MiB") as cache:
        slots = [cache.alloc_reqid() for _ in range(3)]
        for length in (1, TOKENS + 1, 8 * TOKENS):
            cache.step(dict.fromkeys(slots, length))
            for layer in range(2):
                for side, tensor in enumerate(cache.layer(layer)):
                    assert tensor.device == torch.device("cuda:0")
                    for slot in slots:
                        tensor[slot, :length] = slot * 10 + layer * 2 + side
            for layer in range(2):
                for side, tensor in enumerate(cache.layer(layer)):
                    for slot in slots:
                        assert bool((tensor[slot, :length] == slot * 10 + layer * 2 + side).all())
            cache.check()


def test_strides_past_32_bits() -> None:
    with make(max_batch_size=64, max_context_len=2**22, memory_budget="256MiB") as cache:
        slots = [cache.alloc_reqid() for _ in range(64)]
        cache.step({slots[-1]: 100})
        k, _ = cache.layer(0)
        assert k.stride(0) * 63 > 2**32
        k[slots[-1], :100] = 7
        assert float(k[slots[-1], :100].sum()) == 7 * 100 * 128


def test_pages_wait_for_the_kernels_of_a_finished_request() -> None:
    """Kernels that still run when the request is freed read what they were launched on, though its pages are taken."""
    with make() as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 8 * TOKENS})
        k, _ = cache.layer(0)
        k[reqid, : 8 * TOKENS] = 1
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        total = k[reqid, : 8 * TOKENS].sum()
        cache.free_reqid(reqid)
        cache.alloc_reqid()
        other = cache.alloc_reqid()
        cache.step({other: 8 * TOKENS})  # takes the pages of the first, after its kernels
        k[other, : 8 * TOKENS] = 2
        assert float(total) == 8 * TOKENS * 128
        assert cache.stats().calls["cuEventSynchronize"].count >= 1


def test_a_step_that_would_map_inside_a_capture_is_refused() -> None:
    with make() as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10})
        cache.check()
        graph = torch.cuda.CUDAGraph()
        k, _ = cache.layer(0)
        k[reqid, :10].add_(1)  # loads the kernel before the capture
        with torch.cuda.graph(graph):
            k[reqid, :10].add_(1)
            with pytest.raises(vattn.StreamCapturing):
                cache.step({reqid: 5 * TOKENS})
            cache.step({reqid: 11})
        k[reqid, :10] = 0
        graph.replay()
        assert float(k[reqid, :10].sum()) == 10 * 128


def test_a_captured_graph_replays_as_the_cache_grows() -> None:
    """Addresses do not change: a kernel that takes its position from memory reads tokens mapped after the capture."""
    with make() as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 10})
        k, _ = cache.layer(0)
        position = torch.zeros(1, dtype=torch.int64, device="cuda")
        out = torch.zeros(128, device="cuda")
        k[reqid, :10] = 0
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            out.copy_(k[reqid, :, 0].index_select(0, position)[0])
        torch.cuda.current_stream().wait_stream(warm)
        cache.check()  # nothing is in the worker's hands when the capture begins
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.copy_(k[reqid, :, 0].index_select(0, position)[0])
        for token in (5, TOKENS + 5, 7 * TOKENS + 5):
            cache.step({reqid: token + 1})
            k[reqid, token] = token
            position.fill_(token)
            graph.replay()
            assert float(out.sum()) == token * 128


def test_a_capture_elsewhere_does_not_stop_the_worker() -> None:
    """torch captures in global mode; the worker's thread has opted out."""
    with make() as cache:
        reqid = cache.alloc_reqid()
        work = torch.cuda.Stream()
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda").add_(1)
        with torch.cuda.graph(graph):
            x.add_(1)
            cache.step({reqid: 3 * TOKENS}, stream=work)
        k, _ = cache.layer(0)
        k[reqid, : 3 * TOKENS] = 1
        torch.cuda.synchronize()
        cache.check()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_survives_a_cache_that_is_dropped_in_its_midst(mode: str) -> None:
    dropped = make()
    dropped.step({dropped.alloc_reqid(): TOKENS})
    with make() as cache:
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
        x.add_(0)  # its kernel is loaded
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode):
            x.add_(1)
            refused = False
            try:  # pytest would keep the error, and with it the cache
                dropped.close()
            except vattn.StreamCapturing:
                refused = True
            assert refused
            del dropped
            assert leftovers.holding
            x.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        assert x.tolist() == 8 * [2.0]
        cache.step({cache.alloc_reqid(): TOKENS})  # takes back what the other left
        assert leftovers.holding == {}
        cache.check()


def test_torch_makes_no_stream_that_the_driver_does_not_know() -> None:
    known = cuda.torch_streams(torch.device("cuda", torch.cuda.current_device()))
    assert len(known) == len(set(known))
    for priority in (0, -1):
        made = {int(torch.cuda.Stream(priority=priority).cuda_stream) for _ in range(100)}
        assert made <= set(known)


def test_other_devices_contexts_are_left_alone() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(1)
    try:
        with make(device="cuda:0") as cache:
            cache.step({cache.alloc_reqid(): 100})
            assert torch.cuda.current_device() == 1
    finally:
        torch.cuda.set_device(0)


def test_an_automatic_budget_is_measured_when_the_cache_is_made() -> None:
    """After a model is loaded, that is: what torch holds is not free."""
    torch.cuda.empty_cache()
    weights = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    huge = {"memory_budget": "auto", "max_context_len": 2**30, "max_batch_size": 1}
    with make(**huge, memory_utilization=0.5) as cache:
        budget = cache.capacity().budget_bytes
    assert abs(budget - 0.5 * free) <= 64 * 2**20
    del weights


def test_a_shared_prefix_is_read_and_copied_on_write() -> None:
    with make() as cache:
        ids = list(range(2 * TOKENS + 5))
        first, _ = cache.admit(ids)
        cache.step({first: len(ids)})
        k, v = cache.layer(0)
        for tensor in (k, v):
            tensor[first, : len(ids)] = 1
        cache.commit(first, ids)
        second, cached = cache.admit(ids)
        assert cached == 2 * TOKENS
        assert bool((k[second, :cached] == 1).all())
        child = cache.fork(first)
        assert bool((v[child, : len(ids)] == 1).all())
        cache.step({second: TOKENS + 7})
        cache.step({second: len(ids)})
        k[second, TOKENS + 7 : len(ids)] = 2
        assert bool((k[second, : TOKENS + 7] == 1).all())
        assert bool((k[first, : len(ids)] == 1).all())
        torch.cuda.synchronize()
        cache.check()


def test_a_stream_by_its_handle_becomes_torchs_current_one() -> None:
    """Also the default stream, whose handle is 0; afterwards the current stream is the one before."""
    device = torch.device("cuda", torch.cuda.current_device())
    before = cuda.current_stream(device)
    other = torch.cuda.Stream()
    for handle in (0, other.cuda_stream):
        with cuda.use_stream(device, handle):
            assert cuda.current_stream(device) == handle
        assert cuda.current_stream(device) == before


def shared_pool(**options: Any) -> vattn.PagePool:
    try:
        return vattn.PagePool(BASE["memory_budget"], device="cuda:0", **options)
    except vattn.ConfigError as error:
        pytest.skip(str(error))


def test_pages_of_a_pool_that_says_so_can_be_exported() -> None:
    pages = shared_pool(handle_type="posix_fd")
    with vattn.KVCache(vattn.KVConfig(**BASE), pool=pages) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: 2 * TOKENS})
        k, _ = cache.layer(0)
        for page in range(2):
            export(k[reqid, page * TOKENS].data_ptr())
        k[reqid, : 2 * TOKENS] = 1
        assert float(k[reqid, : 2 * TOKENS].sum()) == 2 * TOKENS * 128
        cache.check()
    pages.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_of_a_peer_access_pages() -> None:
    pages = shared_pool(peers=[1])
    with vattn.KVCache(vattn.KVConfig(**BASE), pool=pages) as cache:
        reqid = cache.alloc_reqid()
        cache.step({reqid: TOKENS})
        k, _ = cache.layer(0)
        k[reqid, :TOKENS] = 3
        torch.cuda.synchronize(0)
        assert float(k[reqid, :TOKENS].to("cuda:1").sum()) == 3 * TOKENS * 128
        torch.cuda.synchronize(1)
        cache.check()
    pages.close()
