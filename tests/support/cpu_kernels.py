"""vattn's kernels for CPUs that this machine can run, chosen as a user would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vattn import cpu

KERNELS = [each.name for each in cpu.kernels() if each.supported]


@contextmanager
def asking_for(name: str | None) -> Iterator[None]:
    """`VATTN_CPU_KERNELS` is `name`, or not set."""
    with pytest.MonkeyPatch.context() as patch:
        if name is None:
            patch.delenv(cpu.VARIABLE, raising=False)
        else:
            patch.setenv(cpu.VARIABLE, name)
        _forget()
        try:
            yield
        finally:
            _forget()


@contextmanager
def taking_keys(way: str) -> Iterator[None]:
    """`VATTN_CPU_KEYS` is `way`; not set where that is empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu.KEYS_VARIABLE, way)
        _forget()
        try:
            cpu.chosen()  # all calls take keys so from now on
            yield
        finally:
            _forget()
    cpu.chosen()


def _forget() -> None:
    for cached in (cpu._index, cpu.chosen, cpu.refusal):
        cached.cache_clear()
