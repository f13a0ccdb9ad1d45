"""Mutations of the broker, of its borrowers, and of pools whose memory is lent."""

from __future__ import annotations

from tests.campaign.mutations import mutation
from vattn.broker import books, notes, server
from vattn.pool import lent


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
