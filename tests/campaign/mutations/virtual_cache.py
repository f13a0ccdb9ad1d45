"""Mutations of `VirtualCache` and its parts."""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from tests.campaign.mutations import mutation
from vattn.cache import KVCache


def _rewrite(owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Replaces a method by one whose source reads differently."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    for old, new in changes:
        assert old in source, f"{name} does not have {old!r}"
        source = source.replace(old, new)
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{source}", vars(sys.modules[owner.__module__]), names)
    setattr(owner, name, names[name])


@mutation("virtual cache", "rows that share pages are handed out as they are", "virtual_cache")
def handed_out_shared() -> None:
    _rewrite(_rows(), "unshare", ("cache.unshare(row)", "pass"))


@mutation("virtual cache", "codes that rows share are assigned where they are", "virtual_cache")
def assigned_shared() -> None:
    _rewrite(_storage(), "assign", ("self._unshare()", "pass"))


@mutation("virtual cache", "rows that were written count as equal still", "virtual_cache")
def written_rows_are_equal() -> None:
    _rewrite(_rows(), "unshare", ("self._equal = [[0] * self.count for _ in range(self.count)]", "pass"))


@mutation("virtual cache", "rows are forked under tensors that were taken", "virtual_cache")
def forked_under_tensors() -> None:
    _rewrite(_storage(), "select", (" or self._lent", ""))


@mutation("virtual cache", "what a failed call has made is left to its traceback", "virtual_cache")
def half_made_stays() -> None:
    from vattn.hf import storage

    def close(caches: Iterable[KVCache]) -> None:
        if sys._getframe(1).f_code.co_name == "_retire":
            for cache in caches:
                with contextlib.suppress(Exception):
                    cache.close()

    storage._close = close


@mutation("virtual cache", "the traceback of a failed update keeps what it shows", "virtual_cache")
def traceback_keeps() -> None:
    from vattn.hf.virtual_cache import VirtualLayer

    _rewrite(VirtualLayer, "update", ("view = None\n", "pass\n"))


@mutation("virtual cache", "a refused crop takes full layers back and forth", "virtual_cache")
def crop_forth_again() -> None:
    from vattn.errors import InvalidLength

    rows = _rows()
    true = rows.go_back

    def go_back(self: Any, length: int) -> None:
        try:
            true(self, length)
        except InvalidLength:
            for to in (length, self.length):
                for cache in self._caches:
                    if cache.config.tensor_groups[0].sliding_window is None:
                        cache.step(self._all(to))
            raise

    rows.go_back = go_back


@mutation("virtual cache", "what leaves a window is not recorded", "virtual_cache")
def nothing_recorded() -> None:
    _rewrite(_storage(), "advance", ("recording = any(self.recording)", "recording = False"))


@mutation("virtual cache", "a refused update moves where rows begin", "virtual_cache")
def refused_begins_later() -> None:
    _rewrite(_rows(), "step", ("all(_window(cache) is None for cache in caches[:done])", "not done"))


@mutation("virtual cache", "rows that are repeated begin at their length", "virtual_cache")
def repeated_rows_begin() -> None:
    _rewrite(_rows(), "select", ("cache.step(self._all(self.start))", "self.start = length"))


@mutation("virtual cache", "K and V of an update may be broadcast", "virtual_cache")
def broadcast() -> None:
    from vattn.hf.storage import Shape, View

    _rewrite(View, "takes", ("value.shape == (batch, heads, tokens, v_head_dim)", "True"))
    _rewrite(Shape, "of", ("@classmethod\n", ""), ("key.shape[:3] != value.shape[:3]", "False"))
    Shape.of = classmethod(Shape.__dict__["of"])  # type: ignore[method-assign]


@mutation("virtual cache", "lost rows leave limits behind", "virtual_cache")
def limits_of_lost_rows() -> None:
    _rewrite(_rows(), "step", ("self._first.clear()", "pass"))


@mutation("virtual cache", "an interrupted crop lowers the memory and not the lengths", "virtual_cache")
def interrupted_crop() -> None:
    lengths = "self.lengths, self.ungraded, self.initialized = after, ungraded, initialized"
    _rewrite(_storage(), "cut", (f"{lengths}\n", "rows and rows.step(longest)\n"), ("self.settle()", lengths))


@mutation("virtual cache", "a move stores what it makes as it goes", "virtual_cache")
def move_in_parts() -> None:
    try_ = "    try:\n        rows.arrived"
    _rewrite(_storage(), "_move", (try_, f"    self._rows, self._places = rows, places\n{try_}"))


@mutation("virtual cache", "slots that an interrupted call freed stay free", "virtual_cache")
def unclaimed_slots() -> None:
    _rows().length = property(lambda self: max((cache.length(0) for cache in self._caches), default=0))


@mutation("virtual cache", "memory that an interrupted crop left shorter than its contents stays so", "virtual_cache")
def memory_stays_short() -> None:
    _rewrite(_storage(), "settle", ("<= max(self.lengths) == self._rows", "<= max(self.lengths) >= self._rows"))


@mutation("virtual cache", "after a crop that did not end windows begin where rows did", "virtual_cache")
def back_and_forth() -> None:
    _rewrite(_rows(), "go_back", ("self.start = max(start, length)", "pass"))


@mutation("virtual cache", "after an interrupted crop windows begin where rows did", "virtual_cache")
def windows_begin_with_rows() -> None:
    _rewrite(_storage(), "first_kept", ("min(self._rows.start, max(self.lengths))", "self._rows.start"))
    _rewrite(_storage(), "saved", ("min(self._rows.start, max(self.lengths))", "self._rows.start"))
    _rewrite(_storage(), "settle", ("self._rows.start <= max(self.lengths)", "max(self.lengths)"))


@mutation("virtual cache", "what a refused update gave back is shown", "virtual_cache")
def shown_after_refusal() -> None:
    _rewrite(_rows(), "step", ("max(self.start, start)", "self.start"))


@mutation("virtual cache", "an update has the memory that an interrupted one had", "virtual_cache")
def memory_of_another() -> None:
    for name in ("settle", "advance"):
        _rewrite(_storage(), name, ("self.end = -1", "pass"))


@mutation("virtual cache", "rows are alike in tokens that a crop has taken", "virtual_cache")
def alike_beyond() -> None:
    _rewrite(_rows(), "go_back", ("[[min(tokens, length) for tokens in row] for row in equal]", "equal"))


@mutation("virtual cache", "a recorded past is lost with an interrupted update", "virtual_cache")
def past_is_lost() -> None:
    _rewrite(_rows(), "_take_back", ("start < before < length", "False"))


@mutation("virtual cache", "an interrupted assignment leaves codes and scales of two tensors", "virtual_cache")
def torn_codes() -> None:
    _rewrite(_storage(), "assign", ("view.store_part(which, new, first)\n            raise", "raise"))


@mutation(None, "a tensor that was taken changes with a crop", "virtual_cache")
def crop_under_tensors() -> None:
    _storage()._detach = lambda self: None


@mutation(None, "a window is a token shorter", "virtual_cache")
def shorter_window() -> None:
    from vattn.hf.virtual_cache import VirtualSlidingLayer

    _rewrite(VirtualSlidingLayer, "_first_seen", ("+ 1", "+ 2"))


@mutation(None, "rows that differ are taken for equal by a token", "virtual_cache")
def equal_by_a_token() -> None:
    _rewrite(_rows(), "select", ("start < length:", "start < length - 1:"))


def _rows() -> Any:
    from vattn.hf.batch_rows import BatchRows

    return BatchRows


def _storage() -> Any:
    from vattn.hf.storage import Storage

    return Storage
