"""Streams by their handles."""

from __future__ import annotations

import pytest
import torch

from vattn.drivers import cuda


@pytest.mark.parametrize(("handle", "expected"), [(0, "default stream of cuda:1"), (0x70, "stream 112 of cuda:1")])
def test_the_handle_0_is_the_default_stream(monkeypatch: pytest.MonkeyPatch, handle: int, expected: str) -> None:
    """torch makes a new stream of an external stream with the handle 0."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default stream of {device}")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"stream {handle} of {device}")
    assert cuda.torch_stream(torch.device("cuda", 1), handle) == expected  # type: ignore[comparison-overlap]
