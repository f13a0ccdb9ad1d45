"""Decisions about leases: who gets what, whom it is asked back from, and that nothing is lent twice, whatever messages
do on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.effort import effort
from vattn.broker.books import PATIENCE, REST, Account, Books
from vattn.broker.lease import Lease
from vattn.errors import ConfigError

PAGE = 4096
BUDGET = 64 * PAGE


def report(account: Account, **given: Any) -> dict[str, Any]:
    """A report of a borrower that has seen everything."""
    said = {"ack": account.number, "lease": account.lease, "want": account.want, "urgent": 0, "wish": account.wish}
    return said | {"owned": 0, "parked": 0, "cached": 0, "oldest": None, "shared": 0} | given


def joined(budget: int = BUDGET, **shares: dict[str, Any]) -> tuple[Books, list[Account]]:
    books = Books(budget)
    return books, [books.join(name, page=PAGE, **share) for name, share in shares.items()]


def lend(books: Books, account: Account, pages: int, **having: int) -> None:
    books.report(account, report(account, want=pages * PAGE), 0.0)
    books.settle(0.0)
    assert account.lease == pages * PAGE
    books.report(account, report(account, **{name: n * PAGE for name, n in having.items()}), 0.0)


def test_what_nobody_needs_is_anybodys() -> None:
    books, (a, _) = joined(a={}, b={"at_least": 16 * PAGE})
    lend(books, a, 64)
    assert books.available == 0


def test_leases_keep_to_their_most_and_names_are_unique() -> None:
    books, (a,) = joined(a={"at_most": 8 * PAGE})
    books.report(a, report(a, want=64 * PAGE), 0.0)
    books.settle(0.0)
    assert a.lease == 8 * PAGE
    assert books.join("a", page=PAGE).name == "a#2"


def test_more_than_there_is_cannot_be_guaranteed() -> None:
    books, (a, b) = joined(a={"at_least": 40 * PAGE}, b={})
    with pytest.raises(ConfigError, match=r"160.0 KiB are guaranteed to others"):
        books.join("c", page=PAGE, at_least=32 * PAGE)
    with pytest.raises(ConfigError, match="more than at most"):
        books.limit(b, 8 * PAGE, 4 * PAGE)
    books.limit(a, 0, None)
    books.join("c", page=PAGE, at_least=32 * PAGE)


def ask(books: Books, asker: Account, pages: int, now: float, **having: Any) -> list[Account]:
    books.report(asker, report(asker, want=asker.lease + pages * PAGE, urgent=2, wish=asker.wish + 1, **having), now)
    return books.settle(now)


def test_unused_leases_go_before_parked_pages_before_cached_prefixes() -> None:
    books, (a, b, c, d) = joined(a={}, b={}, c={}, d={})
    lend(books, a, 20, owned=4)  # 16 unused
    lend(books, b, 20, parked=10, owned=10)
    lend(books, c, 20, cached=20)
    c.oldest = 1
    lend(books, d, 4)
    assert ask(books, d, 24, 1.0) == [a, b]
    assert (a.give, a.stage) == (4 * PAGE, "free")
    assert (b.give, b.stage) == (12 * PAGE, "parked")
    for account in (a, b):
        books.report(account, report(account, lease=account.give, owned=account.owned, want=0), 1.0)
    books.settle(1.0)
    assert d.lease == 28 * PAGE
    d.want += 8 * PAGE
    books.settle(1.0)
    assert (c.stage, a.give, b.stage) == ("cached", None, "free")


def test_the_prefix_that_was_used_longest_ago_goes_first_wherever_it_is() -> None:
    books, (a, b, c) = joined(a={}, b={}, c={})
    lend(books, a, 30, cached=30)
    lend(books, b, 30, cached=30)
    lend(books, c, 4)
    a.oldest, b.oldest = 20, 10
    ask(books, c, 8, 1.0)
    assert (a.give, b.stage) == (None, "cached")
    books.report(b, report(b, cached=22 * PAGE, oldest=30, lease=22 * PAGE, want=0), 1.0)
    books.settle(1.0)
    assert c.lease == 12 * PAGE
    ask(books, c, 8, 2.0, cached=PAGE, oldest=15)  # its own is older than all others'
    assert (a.give, b.give) == (None, None)


def test_what_is_over_a_smaller_budget_is_taken_from_what_no_request_uses() -> None:
    books = Books(20 * PAGE)
    a, b = (books.restore(name, 0, None, PAGE, 16 * PAGE) for name in ("a", "b"))
    books.keep(4 * PAGE, 2 * PAGE)
    assert books.settle(0.0) == []  # nobody has joined again
    assert books.evictions() == 2 * PAGE
    books.keep(2 * PAGE, 0)
    a, b = (books.join(each.name, page=PAGE, lease=each.lease, before=each) for each in (a, b))
    books.report(a, report(a, owned=PAGE, cached=10 * PAGE, oldest=2), 0.0)
    books.report(b, report(b, owned=12 * PAGE, cached=4 * PAGE, oldest=1), 0.0)
    books.settle(0.0)
    assert (b.give, b.stage, a.give, a.stage) == (12 * PAGE, "cached", 6 * PAGE, "cached")
    books.report(b, report(b, lease=12 * PAGE, owned=12 * PAGE), 0.0)
    books.report(a, report(a, lease=6 * PAGE, owned=PAGE, cached=5 * PAGE, oldest=3), 0.0)
    assert books.available == 0
    assert books.settle(1.0) == []


def test_who_joins_again_has_one_account_with_the_limits_of_its_operator() -> None:
    books, (a, b) = joined(a={}, b={})
    books.limit(a, 8 * PAGE, 16 * PAGE)
    again = books.join("a", page=PAGE, lease=4 * PAGE, before=a)
    assert (again.name, again.at_least, again.at_most, again.lease) == ("a", 8 * PAGE, 16 * PAGE, 4 * PAGE)
    assert books.accounts == [b, again]
    with pytest.raises(ConfigError, match="pages of 3 bytes are not possible"):
        books.join("a", page=3, before=again)
    assert books.accounts == [b, again]


@pytest.mark.parametrize("cached", [{}, {"b": 10}, {"c": 4}])
def test_prefixes_are_asked_for_in_parts_only_where_the_next_oldest_may_be_anothers(cached: dict[str, int]) -> None:
    books, (a, b, c) = joined(a={}, b={}, c={})
    lend(books, a, 40, cached=40)
    lend(books, b, 20, owned=20 - cached.get("b", 0), cached=cached.get("b", 0))
    lend(books, c, 4)
    a.oldest, b.oldest = 10, 20
    had = {"cached": cached["c"] * PAGE, "oldest": 30} if "c" in cached else {}
    ask(books, c, 32, 1.0, **had)
    assert (a.give, a.stage) == ((40 - (16 if cached else 32)) * PAGE, "cached")


def test_what_ended_processes_left_counts_and_goes_before_cached_prefixes() -> None:
    books, (a, b) = joined(a={}, b={})
    books.keep(16 * PAGE, 12 * PAGE)
    lend(books, a, 40, cached=40)
    a.oldest = 1
    assert books.available == 8 * PAGE
    assert ask(books, b, 16, 1.0) == [b]  # what there is
    assert (b.lease, books.evict, a.give, b.short) == (8 * PAGE, 8 * PAGE, None, False)
    assert (books.evictions(), books.evictions()) == (8 * PAGE, 0)
    books.keep(8 * PAGE, 4 * PAGE)
    assert books.settle(1.0) == [b]
    assert b.lease == 16 * PAGE
    books.keep(8 * PAGE, 0)  # the rest is in use
    assert ask(books, b, 8, 2.0) == [a]
    assert (a.give, a.stage) == (32 * PAGE, "cached")


def test_running_requests_give_way_only_to_a_guarantee() -> None:
    books, (a, b) = joined(a={"at_least": 16 * PAGE}, b={"at_least": 16 * PAGE})
    lend(books, a, 64, owned=64)
    a.reported = 10.0
    ask(books, b, 32, 5.0)
    assert (a.give, a.stage) == (48 * PAGE, "all")
    books.report(a, report(a, lease=48 * PAGE, owned=48 * PAGE, want=0), 6.0)
    books.settle(6.0)
    assert b.lease == 16 * PAGE
    ask(books, b, 1, 7.0)
    books.report(a, report(a, owned=48 * PAGE), 8.0)
    books.settle(8.0)
    assert a.give is None
    assert b.short


def test_what_is_wanted_ahead_of_need_claims_no_guarantee() -> None:
    books, (a, b) = joined(a={"at_least": 16 * PAGE}, b={"at_least": 16 * PAGE})
    lend(books, a, 64, owned=64)
    books.report(b, report(b, want=16 * PAGE), 5.0)
    books.settle(5.0)
    assert a.give is None
    books.report(b, report(b, want=16 * PAGE, urgent=1, wish=1), 6.0)  # somebody waits for it
    books.settle(6.0)
    assert (a.give, a.stage) == (48 * PAGE, "all")


def test_a_lease_is_filled_up_to_what_is_asked_of_running_requests() -> None:
    lease = Lease()
    lease.joined({"number": 1, "lease": 0, "at_least": 0, "at_most": 64 * PAGE})
    message = {"number": 2, "lease": 60 * PAGE, "at_least": 0, "at_most": 50 * PAGE, "wish": 1, "short": False}
    message |= {"give": 40 * PAGE}
    lease.received(message | {"stage": "all"})
    assert lease.allowed == 40 * PAGE
    lease.received(message | {"number": 3, "stage": "free"})  # no more than nothing uses
    assert lease.allowed == 50 * PAGE


def test_a_lower_limit_is_asked_for_at_once() -> None:
    books, (a,) = joined(a={})
    lend(books, a, 32, owned=32)
    books.limit(a, None, 8 * PAGE)
    assert books.settle(1.0) == [a]  # it was told before anybody asked for memory
    assert (a.give, a.stage) == (8 * PAGE, "all")


def test_what_others_have_ahead_of_need_is_taken_by_need_only() -> None:
    """Or two engines that both look ahead would take it from each other for ever."""
    for urgent, kept in ((0, 2), (1, 1), (2, 0)):
        books, (a, b) = joined(a={}, b={})
        lend(books, a, 64)
        a.owned = 64 * PAGE - 2 * a.chunk
        books.report(b, report(b, want=64 * PAGE, urgent=urgent, wish=1), 1.0)
        books.settle(1.0)
        assert (a.lease if a.give is None else a.give) == a.owned + kept * a.chunk


def test_a_smaller_budget_guarantees_less_and_refuses_nobody_who_was_there() -> None:
    books = Books(32 * PAGE)
    for name in "ab":
        books.restore(name, at_least=24 * PAGE, at_most=64 * PAGE, page=PAGE, lease=8 * PAGE)
    books.check()
    assert [account.at_least for account in books.accounts] == [24 * PAGE, 8 * PAGE]
    assert [account.at_most for account in books.accounts] == [32 * PAGE] * 2


@pytest.mark.parametrize("small", [PAGE // 2, 8 * PAGE])
def test_the_limits_outlast_a_broker_with_a_smaller_budget(small: int) -> None:
    """Limits are noted as they were asked for: a budget that was given by mistake lowers them for its broker alone."""
    noted = {"name": "a", "at_least": 24 * PAGE, "at_most": None, "page": PAGE, "lease": 0}
    account = Books(small).restore(**noted)
    assert account.at_least == account.at_most == small // PAGE * PAGE
    assert (account.least_asked, account.most_asked) == (24 * PAGE, None)
    books = Books(64 * PAGE)
    account = books.restore(**noted | {"at_least": account.least_asked, "at_most": account.most_asked})
    again = books.join("a", page=PAGE, before=account)
    assert (again.at_least, again.at_most) == (24 * PAGE, 64 * PAGE)
    books.limit(again, 8 * PAGE, None)
    assert (again.least_asked, again.most_asked) == (8 * PAGE, None)


def test_a_refused_limit_is_named_as_it_was_given() -> None:
    books, (a,) = joined(a={})
    with pytest.raises(ConfigError, match=r"at most 1.0 KiB is below one page of 4.0 KiB"):
        books.limit(a, None, 1024)
    assert (a.at_most, a.most_asked) == (64 * PAGE, None)


def test_who_does_not_answer_is_left_alone_and_the_asker_is_told() -> None:
    books, (a, b) = joined(a={}, b={})
    lend(books, a, 64, parked=64)
    assert ask(books, b, 8, 1.0) == [a]
    assert books.due(1.0) == PATIENCE
    assert books.settle(1.1 + PATIENCE) == [b]
    assert (a.give, b.short) == (None, True)
    books.settle(9.0)
    assert a.give is None
    books.report(a, report(a, parked=64 * PAGE), 10.0)  # it is back
    assert books.settle(10.0) == [a]
    assert a.give is not None


def test_who_has_nothing_to_give_rests() -> None:
    books, (a, b) = joined(a={}, b={})
    lend(books, a, 64, parked=64)
    ask(books, b, 8, 1.0)
    books.report(a, report(a, parked=64 * PAGE), 1.0)  # a capture, say, keeps it from giving
    assert books.settle(1.0) == [b]
    assert (a.give, b.short) == (None, True)
    assert books.due(1.0) == REST
    assert books.settle(1.0 + REST) == [a]


def test_who_may_have_changed_is_asked_what_it_has() -> None:
    books, (a, b) = joined(a={}, b={})
    lend(books, a, 64, owned=64)
    assert ask(books, b, 8, 5.0) == [a]
    assert a.give is None
    books.report(a, report(a, parked=64 * PAGE), 5.1)
    books.settle(5.1)
    assert a.stage == "parked"


def test_memory_that_is_found_counts_although_it_was_never_lent() -> None:
    books, (a, b) = joined(a={}, b={})
    books.observe(a, 60 * PAGE)
    ask(books, b, 8, 1.0)
    assert b.lease == 4 * PAGE
    books.observe(a, 0)
    books.settle(2.0)
    assert b.lease == 8 * PAGE


def test_an_answer_to_what_was_never_said_is_refused() -> None:
    books, (a,) = joined(a={})
    with pytest.raises(ConfigError, match="never told"):
        books.report(a, report(a, ack=a.number + 1), 0.0)


@dataclass
class Client:
    """A borrower without a process: it has `held` pages, and never more than its lease allows."""

    name: str
    lease: Lease = field(default_factory=Lease)
    account: Account | None = None
    alive: bool = True
    held: int = 0  # bytes
    want: int = 0
    up: list[dict[str, Any]] = field(default_factory=list)  # on their way to the broker, and back
    down: list[dict[str, Any]] = field(default_factory=list)


class Pool(RuleBasedStateMachine):
    """Three borrowers and a broker. Every message may be lost, doubled or late, every process killed at any point.

    Every page has a place in a machine whose memory is the budget; a lease is never more than the books say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.books = Books(BUDGET)
        self.clients: list[Client] = []
        for name in "abc":
            self.join(Client(name))

    def join(self, client: Client) -> None:
        client.up.clear()
        client.down.clear()
        client.account = self.books.join(client.name, page=PAGE, lease=client.lease.level)
        client.lease.joined(
            {name: getattr(client.account, name) for name in ("number", "lease", "at_least", "at_most")}
        )
        if client not in self.clients:
            self.clients.append(client)

    def settle(self) -> None:
        for account in self.books.settle(self.now):
            for client in self.clients:
                if client.account is account:
                    client.down.append(self.books.message(account))

    who = st.integers(0, 2)
    pages = st.integers(0, 64)

    @rule(i=who, n=pages, urgent=st.integers(0, 2))
    def say(self, i: int, n: int, urgent: int) -> None:
        """Reports what it has, and wants some pages."""
        client = self.clients[i]
        client.want = n * PAGE
        said = {
            "ack": client.lease.number,
            "lease": client.lease.level,
            "want": client.want,
            "urgent": urgent,
            "wish": n,
        }
        half = client.held // PAGE // 2 * PAGE
        said |= {"owned": client.held - half, "parked": half, "cached": 0, "oldest": None, "shared": 0}
        client.up.append(said)

    @rule(i=who, n=pages)
    def fill(self, i: int, n: int) -> None:
        """Takes pages out of its lease, or gives some to the machine."""
        client = self.clients[i]
        client.held = min(n * PAGE, client.lease.level)

    @rule(i=who)
    def yield_(self, i: int) -> None:
        """Does what it is asked for, between two steps."""
        client = self.clients[i]
        if client.lease.give is not None:
            level, stage = client.lease.give
            if stage != "free":
                client.held = min(client.held, max(level, client.held // 2 // PAGE * PAGE))
            client.lease.lowered(max(level, client.held))
            client.lease.complied()

    @rule(i=who, place=st.integers(0, 7), fate=st.sampled_from(["comes", "comes", "comes", "lost", "doubled"]))
    def upwards(self, i: int, place: int, fate: str) -> None:
        client = self.clients[i]
        if client.up and client.account is not None:
            message = client.up[place % len(client.up)]
            if fate != "doubled":
                client.up.remove(message)
            if fate != "lost":
                self.books.report(client.account, message, self.now)
                self.settle()

    @rule(i=who, place=st.integers(0, 7), fate=st.sampled_from(["comes", "comes", "comes", "lost", "doubled"]))
    def downwards(self, i: int, place: int, fate: str) -> None:
        client = self.clients[i]
        if client.down:
            message = client.down[place % len(client.down)]
            if fate != "doubled":
                client.down.remove(message)
            if fate != "lost":
                client.lease.received(message)

    @rule(i=who)
    def kill(self, i: int) -> None:
        """It is gone with all it had; another one comes."""
        client = self.clients[i]
        if client.account is not None:
            self.books.remove(client.account)
        self.clients[i] = Client(client.name)
        self.clients[i].account = self.books.join(client.name, page=PAGE)
        account = self.clients[i].account
        assert account is not None
        self.clients[i].lease.joined({"number": account.number, "lease": 0, "at_least": 0, "at_most": account.at_most})
        self.settle()

    @rule()
    def kill_broker(self) -> None:
        """Another one comes, which knows what its borrowers tell it."""
        self.books = Books(BUDGET)
        for client in self.clients:
            self.join(client)

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(i=who, n=st.integers(1, 64))
    def limit(self, i: int, n: int) -> None:
        account = self.clients[i].account
        assert account is not None
        self.books.limit(account, None, n * PAGE)
        self.settle()

    @precondition(lambda self: self.now > 1)
    @rule()
    def calm(self) -> None:
        """Where all messages come, wishes that fit and that somebody waits for are granted, and limits are kept to."""
        wish = min(self.books.budget // 4, *(client.account.at_most for client in self.clients if client.account))
        for _ in range(40):
            self.now += 0.3
            for i, client in enumerate(self.clients):
                client.held = min(client.held, wish)
                while client.down:
                    self.downwards(i, 0, "comes")
                self.yield_(i)
                self.say(i, wish // PAGE, 1)
                while client.up:
                    self.upwards(i, 0, "comes")
            self.settle()
        for client in self.clients:
            assert client.account is not None
            assert wish <= client.lease.level <= max(client.account.at_most, wish)

    @invariant()
    def nothing_is_lent_twice(self) -> None:
        self.books.check()
        assert sum(client.held for client in self.clients) <= BUDGET
        assert sum(account.lease for account in self.books.accounts) <= BUDGET
        for client in self.clients:
            assert client.account is not None
            assert client.held <= client.lease.level <= client.account.lease


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=effort(60, 2000), stateful_step_count=effort(50, 200), deadline=None)
