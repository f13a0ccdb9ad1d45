"""Caches of preempted requests, kept in host memory until there is room for them again.

The cache of a preempted request can be recomputed, or copied out and back. Which is cheaper depends on the model and
the machine, so both are estimated from measurements: seconds per prefilled token, and seconds per byte copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from vattn.attention import PackedBatch, Span

from ..checks import checked_choice
from ..kv.base import KVBackend
from ..requests.request import Request, SavedKV

logger = logging.getLogger(__name__)

PreemptionMode = Literal["auto", "recompute", "swap"]

# The weight of the newest measurement in a running mean.
_NEWEST = 0.3
# Bytes per second, until a copy has been measured.
_FIRST_GUESS = 2e9


class SwapSpace:
    """Copies of the caches of preempted requests, within a budget.

    Args:
        windows: per layer, its window in tokens, if the backend keeps no others; None for all.
        budget: maximum size of all copies, in bytes.
        token_bytes: bytes of a token in all layers.
        device: the backend's.
        mode: "auto" copies if copying out and back is estimated to be cheaper than recomputing; "swap" whenever there
            is room; "recompute" never.

    Attributes:
        used_bytes: size of all copies now.
        num_saved, num_loaded: how many were copied out and back so far.

    Raises:
        ConfigError: an unknown mode.
    """

    def __init__(
        self,
        kv: KVBackend,
        *,
        windows: Sequence[int | None],
        token_bytes: int,
        budget: int,
        mode: PreemptionMode = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        checked_choice("preemption_mode", mode, get_args(PreemptionMode))
        self._kv = kv
        self._windows = windows
        self._token_bytes = token_bytes
        self._budget = budget
        self._mode = mode
        self._device = torch.device(device)
        self._seconds_per_byte = 1 / _FIRST_GUESS
        self._seconds_per_token: float | None = None
        self.used_bytes = 0
        self.num_saved = 0
        self.num_loaded = 0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take a step's prefill speed into the estimate."""
        self._seconds_per_token = _mean(self._seconds_per_token, seconds / num_tokens)

    def save(self, request: Request) -> SavedKV | None:
        """A copy of a running request's cache; None if it is to be recomputed, as where there is no memory for one."""
        length = min(request.num_computed_tokens, request.num_tokens - 1)  # the newest is recomputed for its logits
        if request.slot is None or not self._worthwhile(length):
            return None
        start = time.perf_counter()
        layers = []
        try:
            for layer, window in enumerate(self._windows):
                # Tokens that no later query sees may be gone already.
                first = 0 if window is None else max(0, length - window + 1)
                layers.append(self._kv.copy_out(layer, request.slot, length, first))
        except Exception as error:
            logger.warning("a preempted request will be recomputed, as its cache cannot be copied: %s", error)
            return None
        num_bytes = sum(tensor.nbytes for layer in layers for tensor in layer)
        saved = SavedKV(length, layers, num_bytes)
        self._copied(saved.num_bytes, time.perf_counter() - start)
        self.used_bytes += saved.num_bytes
        self.num_saved += 1
        return saved

    def load(self, request: Request) -> bool:
        """Copy a running request's saved tokens back into its slot, which is prepared for them, and drop the copy.

        Returns:
            Whether its slot has them; if not, as where there is no memory for a copy, it is to be recomputed.
        """
        saved, slot = request.saved, request.slot
        assert saved is not None
        assert slot is not None
        start = time.perf_counter()
        try:
            for layer, rows in enumerate(saved.layers):
                batch = PackedBatch((Span(slot, saved.length - len(rows[0]), saved.length),), self._device)
                self._kv.copy_in(layer, batch, [tensor.to(self._device) for tensor in rows])
        except Exception as error:
            logger.warning("a preempted request is recomputed, as its cache cannot be copied back: %s", error)
            self.forget(request)
            request.num_computed_tokens = 0
            self._kv.prepare({slot: 0})  # layers with a window have not backed what comes before the copied tokens
            return False
        self._copied(saved.num_bytes, time.perf_counter() - start)
        self.num_loaded += 1
        self.forget(request)
        return True

    def recount(self, requests: Sequence[Request]) -> None:
        """Recompute `used_bytes` after an interrupted call, from all requests that may have a copy."""
        self.used_bytes = sum(request.saved.num_bytes for request in requests if request.saved is not None)

    def forget(self, request: Request) -> None:
        """Drop a request's copy, if it has one."""
        if request.saved is not None:
            self.used_bytes -= request.saved.num_bytes
            request.saved = None

    def _worthwhile(self, length: int) -> bool:
        num_bytes = length * self._token_bytes
        if self._mode == "recompute" or length == 0 or self.used_bytes + num_bytes > self._budget:
            return False
        if self._mode == "swap":
            return True
        if self._seconds_per_token is None:
            return False
        return 2 * num_bytes * self._seconds_per_byte < length * self._seconds_per_token

    def _copied(self, num_bytes: int, seconds: float) -> None:
        self._seconds_per_byte = _mean(self._seconds_per_byte, seconds / num_bytes)


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST * (newest - mean)
