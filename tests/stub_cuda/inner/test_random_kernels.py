"""The library's random operations, with kernels that run while they happen.

Every step is followed, sooner or later, by kernels that read what it backed; a thread completes them in its own time.
To unmap what a running kernel reads is a violation.
"""

from __future__ import annotations

import random
import threading
import time

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, rule

from stub_cuda import Stub
from tests.support.machines import examples
from tests.support.target import EXAMPLES
from tests.vattn.slots.test_state_machine import CacheMachine


class KernelMachine(CacheMachine):
    """`prepared` are the slots of the last step whose kernels are not launched yet, with their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.stub = Stub()
        self.stub.reset()
        self.stream = self.stub.stream()
        self.prepared: dict[int, int] = {}
        self.random = random.Random(0)
        self.running = True
        self.gpu = threading.Thread(target=self.complete_kernels)
        self.gpu.start()

    @initialize(seed=st.integers(0, 2**32))
    def seed(self, seed: int) -> None:
        self.random = random.Random(seed)

    def complete_kernels(self) -> None:
        pauses = random.Random(1)
        while self.running:
            time.sleep(pauses.random() * 0.005)
            self.stub.complete(self.stream, pauses.randint(1, 8))

    @rule()
    def launch_prepared(self) -> None:
        for slot, length in self.prepared.items():
            for tensor in (tensor for layer in range(2) for tensor in self.cache.layer(layer)):
                for head in range(2):
                    begin, last = tensor[slot, 0, head].data_ptr(), tensor[slot, length - 1, head].data_ptr()
                    self.stub.launch(self.stream, begin, last + 4 - begin)
        self.prepared = {}

    def prepare(self, lengths: dict[int, int]) -> None:
        self.prepared = {slot: length for slot, length in lengths.items() if length}
        if self.random.random() < 0.5:
            self.launch_prepared()

    @invariant()
    def no_precondition_was_broken(self) -> None:
        assert self.stub.violations() == []

    def teardown(self) -> None:
        try:
            if hasattr(self, "cache"):
                self.launch_prepared()
            super().teardown()
        finally:
            self.running = False
            self.gpu.join()
            assert self.stub.violations() == []
            self.stub.reset()


TestKernels = KernelMachine.TestCase
TestKernels.settings = examples(min(EXAMPLES, 60), steps=25)
