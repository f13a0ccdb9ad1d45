"""Decode steps that are recorded: what a graph would replay is run anew from the same tensors, on the CPU."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MethodType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.support import kernel_fakes
from tests.support.backends import chosen
from tests.support.tiny_models import make_model, make_prompts
from tests.support.waiting import SECONDS
from vattn import attention
from vattn.attention import Contiguous, PackedBatch, Span
from vattn.engine import LLM, SamplingParams
from vattn.engine.model.graphs import DecodeGraphs, Forward

SIZES: list[int] = []
CPU = torch.device("cpu")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A recorder that keeps the step, the place of its result and those of the weights, and knows nothing else: as a
    graph does.
    """

    def capture(self: DecodeGraphs, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        with torch.inference_mode(False):
            output = step().clone()
        SIZES.append(len(output))
        places = weight_places(self)

        def replay() -> None:
            assert weight_places(self) == places, "a graph reads where the weights were"
            with torch.inference_mode():
                output.copy_(step())

        return output, replay

    SIZES.clear()
    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    monkeypatch.setattr(DecodeGraphs, "possible", staticmethod(lambda device, kernel: kernel.capturable))
    for kernel in attention._ADAPTERS.values():
        monkeypatch.setattr(kernel, "refusal", lambda self, case: None)
    monkeypatch.setitem(sys.modules, "flash_attn", kernel_fakes.flash_attn_2())
    with kernel_fakes.torch_flash():
        yield


def weight_places(graphs: DecodeGraphs) -> list[int]:
    runner = cast(MethodType, graphs._forward).__self__
    return [weight.data_ptr() for weight in (*runner.model.parameters(), *runner.model.buffers())]


def generate(kv: str, kernel: str, *, enforce_eager: bool) -> list[list[int]]:
    prompts = make_prompts([3, 40, 7, 1, 25], seed=3)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (30, 5, 17, 12, 9)]
    options = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 256}
    model = make_model("qwen2-window")
    options |= {"attention": kernel, "enforce_eager": enforce_eager}
    with LLM(model, **chosen(kv, skip_tokenizer_init=True, memory_budget="64MiB", **options)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.check()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("kernel", ["torch_flash", "flash_attn_2"])
def test_recorded_steps_give_the_same_tokens(whole_kv: str, kernel: str) -> None:
    """Requests come, grow and go; batches of three are padded; each size is captured once."""
    kernel_fakes.need_operator_for(kernel, whole_kv)
    eager = generate(whole_kv, kernel, enforce_eager=True)
    assert SIZES == []
    assert generate(whole_kv, kernel, enforce_eager=False) == eager
    assert sorted(SIZES) == [1, 2, 4]


@pytest.mark.usefixtures("recorded")
def test_a_model_that_cannot_be_captured_runs_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: DecodeGraphs, step: Callable[[], Tensor]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(DecodeGraphs, "_capture", refuse)
    assert generate("virtual", "torch_flash", enforce_eager=False) == generate(
        "virtual", "torch_flash", enforce_eager=True
    )
    assert [r.message for r in caplog.records if "cannot be captured" in r.message] == [
        "decode steps cannot be captured in a CUDA graph and run without one: operation not permitted when stream is "
        "capturing"
    ]


@pytest.mark.usefixtures("recorded")
def test_weights_that_are_replaced_count_after_a_reset() -> None:
    prompts, params = make_prompts([3, 9], seed=3), SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    model, other = copy.deepcopy(make_model("llama")), copy.deepcopy(make_model("llama"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.75)

    def made(llm: LLM) -> list[tuple[list[int], float | None]]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        return [(list(output.token_ids), output.cumulative_logprob) for output in outputs]

    options = {"skip_tokenizer_init": True, "memory_budget": "64MiB", "attention": "torch_flash"}
    with LLM(copy.deepcopy(other), **options) as llm:
        expected = made(llm)
    with LLM(model, **options) as llm:
        assert made(llm) != expected
        assert SIZES
        model.load_state_dict(other.state_dict(), assign=True)
        llm.reset_prefix_cache()
        assert made(llm) == expected


class _Streams:
    """torch.cuda as captures see it: streams, and which of them each device and thread has as the current one.

    Devices are CPUs with an index.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        self.capturing: SimpleNamespace | None = None
        self.captures = 0
        self.end_fails = True
        self._here = threading.local()
        self._torchs_own: SimpleNamespace | None = None
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(DecodeGraphs, "_torch_broken", False)
        for name in ("stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: _named("side", device))
        monkeypatch.setattr(torch.cuda, "current_stream", self.current)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: 1, replay=lambda: None))

    def current(self, device: torch.device = CPU) -> SimpleNamespace:
        """The current stream of a device."""
        found: SimpleNamespace | None = vars(self._here).get(str(device))
        return found or _named("default", device)

    @contextlib.contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        """torch.cuda.stream, which also makes the stream's device the current one."""
        before = dict(vars(self._here))
        vars(self._here).update({str(stream.device): stream, "device": stream.device})
        try:
            yield
        finally:
            vars(self._here).clear()
            vars(self._here).update(before)

    @contextlib.contextmanager
    def graph(
        self,
        graph: SimpleNamespace,
        pool: int | None = None,
        stream: SimpleNamespace | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """torch.cuda.graph, whose exit restores the stream only if the capture ends well."""
        if stream is None:
            if self._torchs_own is None:
                self._torchs_own = _named("torch's own", vars(self._here).get("device", CPU))
            stream = self._torchs_own
        if self.capturing is not None:
            raise RuntimeError("the wait for the device invalidated another capture")
        self.capturing = stream
        self.captures += 1
        entered = self.stream(stream)
        entered.__enter__()
        try:
            yield
        finally:
            self.capturing = None
        if self.end_fails:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        entered.__exit__(None, None, None)


def _named(name: str, device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(name=name, device=device, wait_stream=lambda other: None)


def make_graphs(
    forward: Forward = lambda batch, tokens, rows: rows[:, None], device: torch.device = CPU, length: int = 8
) -> DecodeGraphs:
    kv = SimpleNamespace(stored=lambda layer: Contiguous(*[torch.zeros(1).expand(2, length, 1, 1)] * 2))
    return DecodeGraphs(forward, kv, device, 1)  # type: ignore[arg-type]


def test_a_graph_serves_lengths_up_to_a_power_of_two() -> None:
    """A kernel divides the keys by the longest length of its graph, which must not be that of the longest context."""
    kv = SimpleNamespace(stored=lambda layer: Contiguous(*[torch.zeros(1).expand(2, 100_000, 1, 1)] * 2))
    seen: list[int] = []

    def forward(batch: PackedBatch, tokens: Tensor, rows: Tensor) -> Tensor:
        (group,) = batch.groups
        seen.append(group.max_length)
        return rows[:, None]

    graphs = DecodeGraphs(forward, kv, torch.device("cpu"), 2)  # type: ignore[arg-type]
    graphs._capture = lambda step: (step(), lambda: None)  # type: ignore[method-assign]
    for lengths in ((5,), (1024,), (1025,), (4000,), (4096, 17), (99_999,), (3000,)):
        assert graphs.run([Span(slot, n - 1, n) for slot, n in enumerate(lengths)], [7] * len(lengths)) is not None
    assert seen == [1024, 2048, 4096, 4096, 100_000]


@pytest.mark.parametrize(("version", "captures"), [("2.11.1+cu128", 1), ("2.12.0a0+git1", 2), ("2.13.0", 2)])
def test_after_a_capture_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, captures: int
) -> None:
    """Its stream is not current any more; others may capture if torch recovers."""
    device = _Streams(monkeypatch, version)
    spans = [Span(0, 3, 4)]
    failed, other = make_graphs(), make_graphs()
    assert failed.run(spans, [7]) is None
    assert device.current().name == "default"
    device.end_fails = False
    assert failed.run(spans, [7]) is None
    assert (other.run(spans, [7]) is not None) == (captures == 2)
    assert device.captures == captures
    assert ("torch 2.11.1+cu128 does not recover" in caplog.text) == (captures == 1)
    assert device.current().name == "default"


@pytest.mark.parametrize("end_fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_no_garbage_is_collected_during_a_capture(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, end_fails: bool
) -> None:
    """What a collection would find was collected before; afterwards the collector is as it was."""

    class Dropped:
        pass

    device = _Streams(monkeypatch, "2.13.0")
    device.end_fails = end_fails
    seen: list[tuple[bool, bool, bool]] = []
    dropped = Dropped()
    dropped.cycle = dropped  # type: ignore[attr-defined]
    alive = weakref.ref(dropped)

    def forward(batch: PackedBatch, tokens: Tensor, rows: Tensor) -> Tensor:
        seen.append((device.capturing is not None, gc.isenabled(), alive() is not None))
        return rows[:, None]

    graphs = make_graphs(forward)
    gc.disable()  # the cycle is there until the capture
    try:
        del dropped
        if enabled:
            gc.enable()
        assert (graphs.run([Span(0, 3, 4)], [7]) is None) == end_fails
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen[-1] == (True, False, False)


def test_a_capture_is_on_the_engines_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels go to the current stream of their own device, and one stream is for all captures of an engine."""
    streams = _Streams(monkeypatch, "2.13.0")
    streams.end_fails = False
    found: dict[torch.device, list[SimpleNamespace]] = {}
    for device in (torch.device("cpu", 0), torch.device("cpu", 1)):

        def forward(batch: PackedBatch, tokens: Tensor, rows: Tensor, device: torch.device = device) -> Tensor:
            if streams.capturing is not None:
                assert streams.current(device) is streams.capturing
                found.setdefault(device, []).append(streams.capturing)
            return rows[:, None]

        graphs = make_graphs(forward, device, length=4096)
        for length in (4, 2000):
            assert graphs.run([Span(0, length - 1, length)], [7]) is not None
    assert [len({id(stream) for stream in each}) for each in found.values()] == [1, 1]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_engines_of_two_threads_capture_one_after_the_other(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    streams = _Streams(monkeypatch, version)
    streams.end_fails = False
    begun, go_on = threading.Event(), threading.Event()

    def slow(batch: PackedBatch, tokens: Tensor, rows: Tensor) -> Tensor:
        if streams.capturing is not None:
            begun.set()
            assert go_on.wait(SECONDS)
            assert not gc.isenabled()
        return rows[:, None]

    first, second = make_graphs(slow), make_graphs()
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(first.run, [Span(0, 3, 4)], [7])
        assert begun.wait(SECONDS)
        other = threads.submit(second.run, [Span(0, 3, 4)], [7])
        time.sleep(0.1)
        waits = not other.done()
        go_on.set()
        assert waits
        assert one.result(SECONDS) is not None
        assert other.result(SECONDS) is not None
    assert streams.captures == 2
    assert gc.isenabled()


def test_none_on_the_cpu_and_none_for_kernels_that_cannot() -> None:
    cuda = torch.device("cuda")
    possible = {name: DecodeGraphs.possible(cuda, make()) for name, make in attention._ADAPTERS.items()}
    assert [name for name, can in possible.items() if not can] == ["flashinfer", "native", "torch_sdpa"]
    with LLM(make_model("llama"), skip_tokenizer_init=True, memory_budget="64MiB") as llm:
        assert llm.core.runner.graphs is None
