"""Mutations of the broker, of its borrowers, and of pools whose memory is lent."""

from __future__ import annotations

import fcntl
import os
from typing import Any

from tests.campaign.mutations import mutation
from vattn import _native
from vattn.broker import books, directory, kept, notes, server
from vattn.layout import Layout
from vattn.pool import lent, shares
from vattn.pool.journal import Change
from vattn.slots import blocks, exchange, table


@mutation(None, "a broker does not read what the one before has noted", "broker")
def no_notes() -> None:
    notes.Notes.read = lambda self: []  # type: ignore[method-assign]


@mutation(None, "a lease is told before it is noted", "broker")
def told_before_noted() -> None:
    server.Broker._is_noted = lambda self, borrower: True  # type: ignore[method-assign]


@mutation(None, "leases are granted whatever others have", "broker")
def granted_to_all() -> None:
    books.Books.available = property(lambda self: self.budget)  # type: ignore[method-assign, assignment]


@mutation(None, "a borrower's end goes unnoticed", "broker")
def ends_unnoticed() -> None:
    server.Broker._ended = lambda self, borrower: None  # type: ignore[method-assign]


@mutation(None, "a pool says that it has come down, and keeps its pages", "broker")
def says_it_came_down() -> None:
    def come_down(self: lent.LentCore, level: int, stage: str) -> int:
        self.native.limit = min(self.native.limit, level // self.page_size)
        return level

    lent.LentCore.come_down = come_down  # type: ignore[method-assign]


@mutation(None, "a pool gives nothing back", "broker")
def gives_nothing() -> None:
    lent.LentCore.come_down = lambda self, level, stage: self.borrower.level  # type: ignore[method-assign]


@mutation(None, "what is no message ends the broker", "broker")
def no_message_ends_it() -> None:
    server.WireError = ZeroDivisionError  # type: ignore[assignment, misc]


@mutation(None, "descriptors that nobody claims stay open", "broker")
def unclaimed_stay() -> None:
    def forget(self: server.Broker, peer: server._Peer) -> None:
        peer.received.clear()
        true(self, peer)

    true = server.Broker._forget
    server.Broker._forget = forget  # type: ignore[method-assign]


@mutation("broker", "a pool has more borrowers than top can show", "broker")
def any_borrowers() -> None:
    server._MOST_BORROWERS = 10**6


@mutation("shares", "an owner takes blocks back that others have mapped", "broker")
def taken_back_though_mapped() -> None:
    def lock(self: directory.Directory, kind: int, number: int, count: int = 1) -> bool:
        return kind == fcntl.F_WRLCK or true(self, kind, number, count)

    true = directory.Directory._lock
    directory.Directory._lock = lock  # type: ignore[method-assign]


@mutation("shares", "a reader maps blocks without a pin", "broker")
def mapped_without_pin() -> None:
    directory.Directory.pin = lambda self, number, count=1: True  # type: ignore[method-assign]


@mutation("shares", "blocks of any fingerprint are mapped", "broker")
def any_fingerprint() -> None:
    def shape(layout: Layout, page_size: int, fingerprint: bytes, pages: int) -> Any:
        return true(layout, page_size, bytes(32), pages)

    true = exchange._shape
    exchange._shape = shape


@mutation("shares", "the broker gives back what a process has published that has ended", "broker")
def published_given_back() -> None:
    kept.Kept._unpublished = lambda self: [(0, os.fstat(self.memory).st_size)]  # type: ignore[method-assign]


@mutation("shares", "what is withdrawn stays in slots that are zeroed", "broker")
def withdrawn_stays() -> None:
    def withdraw(self: table.SlotTable, change: Change, shared: blocks.SharedBlocks, block: blocks.PageBlock) -> None:
        shared.retract(change, block)
        for slot in filter(self.idle.__contains__, block.slots):
            self.changed(slot)

    table.SlotTable.withdraw = withdraw  # type: ignore[method-assign]


@mutation("shares", "what is withdrawn is reused at once", "broker")
def withdrawn_reused() -> None:
    def withdraw(self: shares.Shares, change: Change, number: int, pages: tuple[_native.Pages, ...]) -> None:
        self.directory.withdraw(number)
        for each in pages:
            self._native.let_go(change.transaction, each)

    shares.Shares.withdraw = withdraw  # type: ignore[method-assign]


@mutation("shares", "what is evicted while others have it is reused at once", "broker")
def hidden_reused() -> None:
    def hide(self: shares.Shares, change: Change, number: int, key: bytes, pages: tuple[_native.Pages, ...]) -> None:
        self.directory.hide(number)
        for each in pages:
            self._native.let_go(change.transaction, each)

    shares.Shares.hide = hide  # type: ignore[method-assign]
