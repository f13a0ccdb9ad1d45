"""The books of a broker: who has which lease, who gets more, and whom it is asked back from. No input or output.

Law: the sum of the charges and of what is kept is at most the budget. A charge is the lease, or what the borrower's
memory is found to be, if that is more. A broker that took over from an earlier one may begin above the budget, and then
asks for what no request uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vattn.broker.wire import AHEAD, NEEDED, STAGES, Message
from vattn.errors import ConfigError
from vattn.units import format_bytes

PATIENCE = 1.0  # seconds in which a borrower has to answer
REST = 0.25  # seconds for which one that had nothing to give is not asked
_MOST_CHUNK = 2**28


@dataclass(eq=False)
class Account:
    """A borrower. Sizes are bytes.

    Attributes:
        name: unique among the accounts.
        at_least, at_most: what it is guaranteed; the most that it may have.
        least_asked, most_asked: the same as they were asked for, which a smaller budget than an earlier broker's does
            not allow; None for no limit but the budget.
        page: all leases are multiples of it.
        lease: the most memory that it may have now.
        number: of the last message to it.
        heard: the number of the last message that it has dealt with.
        sent: when the last message was sent; `again`: it seems to be lost, or lacks something that has changed.
        want: the lease that it would like to have; `urgent`: how much so (`wire.AHEAD` and so on); `wish`: its number.
        owned, parked, cached: what it has, as it last said: of running requests, of none, of cached prefixes.
        oldest: when the cached block that it would evict next was last used.
        found: bytes that its memory was found to be; 0 where that cannot be seen.
        give, stage: what it is asked for, since `asked`; None if it is not.
        rest: it is not asked again before for what the stage `rested` allows, unless what it has changes.
        idle: what no request used when it last gave less than it was asked for.
        reported: when it last said what it has; `probed`: when it was last asked to.
        silent: it did not answer in time, and has said nothing since.
        wished: when it last said what it wants.
        short: whether it was told that there is no more to be had.
        lost: it has no connection, but its process lives.
        asked_back: bytes that it was asked for and gave, so far.
        shared: bytes of others, or of the broker, that it has mapped.
    """

    name: str
    at_least: int
    at_most: int
    least_asked: int
    most_asked: int | None
    page: int
    chunk: int
    lease: int = 0
    number: int = 1
    heard: int = 1
    sent: float = 0.0
    again: bool = False
    want: int = 0
    urgent: int = AHEAD
    wish: int = 0
    owned: int = 0
    parked: int = 0
    cached: int = 0
    oldest: int | None = None
    found: int = 0
    give: int | None = None
    stage: str | None = None
    asked: float = 0.0
    rest: float = 0.0
    rested: int = 0
    idle: int = -1
    reported: float = 0.0
    probed: float = 0.0
    silent: bool = False
    wished: float = 0.0
    short: bool = False
    lost: bool = False
    asked_back: int = 0
    shared: int = 0
    waiting_since: float = 0.0

    @property
    def charge(self) -> int:
        return max(self.lease, self.found)

    @property
    def unused(self) -> int:
        """The part of the lease that is under no page of a cache."""
        return max(0, self.lease - self.owned - self.parked - self.cached)

    @property
    def claims(self) -> bool:
        """Whether it is below its guarantee, and somebody waits for more."""
        return self.lease < self.at_least and self.urgent > AHEAD

    @property
    def goal(self) -> int:
        """The lease that it would like to have, and may."""
        return min(self.want, self.at_most)


class Books:
    """The leases of one pool.

    Args:
        budget: bytes that all borrowers may have together.

    Attributes:
        accounts: in the order in which they joined.
        kept: bytes of published blocks whose process has ended; `evictable`: those that can be given up.
        evict: bytes of these that are to be given up, for somebody who lacks them.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.accounts: list[Account] = []
        self.kept = self.evictable = self.evict = 0

    @property
    def available(self) -> int:
        """Bytes that nobody has; negative while there is more than the budget."""
        return self.budget - self.kept - sum(account.charge for account in self.accounts)

    def join(
        self,
        name: str,
        *,
        page: int,
        at_least: int = 0,
        at_most: int | None = None,
        lease: int = 0,
        before: Account | None = None,
    ) -> Account:
        """Opens an account.

        Args:
            lease: that the borrower has of an earlier broker, and may have filled.
            before: the account of a borrower that joins again, in whose place this one comes; its limits stay, since
                its operator may have changed them.

        Raises:
            ConfigError: its limits are not possible. Nothing changed.
        """
        if before is not None:
            at_least, at_most = before.least_asked, before.most_asked
        if page <= 0 or page & (page - 1) or page > self.budget:
            raise ConfigError(f"pages of {page} bytes are not possible in a budget of {format_bytes(self.budget)}")
        least, most = self._rounded(at_least, at_most, page)
        if before is not None:
            least = self._affordable(least, most, page, before)
        if lease % page:
            raise ConfigError("a lease is a number of pages")
        self._check_limits(least, most, page, before, at_most)
        others = [account for account in self.accounts if account is not before]
        names = {account.name for account in others}
        unique = next(
            each for each in itertools.chain([name], (f"{name}#{n}" for n in itertools.count(2))) if each not in names
        )
        chunk = min(max(self.budget // 64, 16 * page), _MOST_CHUNK, max(page, most // 4)) // page * page
        account = Account(unique, least, most, at_least, at_most, page, chunk, lease=lease)
        self.accounts[:] = [*others, account]
        return account

    def restore(self, name: str, at_least: int, at_most: int | None, page: int, lease: int) -> Account:
        """Opens the account of a borrower of an earlier broker, which has yet to join this one; limits as asked for."""
        least, most = self._rounded(at_least, at_most, page)
        least = self._affordable(least, most, page, None)
        account = Account(name, least, most, at_least, at_most, page, page, lease=lease, lost=True)
        self.accounts.append(account)
        return account

    def remove(self, account: Account) -> None:
        """Closes an account whose memory is gone."""
        self.accounts.remove(account)

    def lose(self, account: Account) -> None:
        """Notes that a borrower's connection has ended. What it has counts until its process ends, too."""
        account.lost = True

    def observe(self, account: Account, found: int) -> None:
        """Notes how many bytes a borrower's memory was found to be."""
        account.found = found

    def shrink(self, account: Account) -> None:
        """Lowers the lease of a borrower whose pool is closed to what is left of its memory."""
        account.lease = -(-account.found // account.page) * account.page

    def keep(self, num_bytes: int, evictable: int) -> None:
        """Notes how many bytes processes that have ended have left, and how many of them can be given up."""
        self.kept, self.evictable = num_bytes, evictable

    def evictions(self) -> int:
        """Bytes of these that are to be given up now, for somebody who lacks them; each is asked for once."""
        evict, self.evict = self.evict, 0
        return evict

    def report(self, account: Account, message: Message, now: float) -> None:
        """Takes what a borrower says it has and wants.

        Raises:
            ConfigError: it has seen what was never sent.
        """
        if message["ack"] > account.number:
            raise ConfigError("a borrower answers what it was never told")
        if (account.owned, account.parked, account.cached) != tuple(message[n] for n in ("owned", "parked", "cached")):
            account.rest = 0.0
        for name in ("owned", "parked", "cached", "oldest", "urgent", "shared"):
            setattr(account, name, message[name])
        wish, account.wish = account.wish, message["wish"]
        account.reported, account.silent = now, False
        want = -(-message["want"] // account.page) * account.page
        if want != account.want or wish != account.wish:
            account.short, account.wished = False, now
        if account.goal <= account.lease:
            account.waiting_since = now
        account.want = want
        account.heard = max(account.heard, message["ack"])
        if account.heard < account.number and now - account.sent > PATIENCE:
            account.again = True
        if message["ack"] == account.number:
            level = -(-message["lease"] // account.page) * account.page
            if level < account.lease:
                if account.give is not None:
                    account.asked_back += account.lease - level
                account.lease = level
            # What running requests have comes bit by bit.
            if account.give is not None and (account.lease <= account.give or account.stage != "all"):
                self._answered(account, now)

    def limit(self, account: Account, at_least: int | None, at_most: int | None) -> None:
        """Changes what a borrower is guaranteed, and the most that it may have.

        Raises:
            ConfigError: that is not possible.
        """
        page = account.page
        rounded = self._rounded(at_least or 0, at_most, page)
        least = account.at_least if at_least is None else rounded[0]
        most = account.at_most if at_most is None else rounded[1]
        self._check_limits(least, most, page, account, at_most)
        account.at_least, account.at_most = least, most
        if at_least is not None:
            account.least_asked = at_least
        if at_most is not None:
            account.most_asked = at_most
        account.again = True

    def reclaim(self, account: Account, stage: str, now: float) -> None:
        """Asks a borrower for everything up to a stage, whether anybody needs it or not."""
        # Not down to what it said that it needs: requests may have ended since.
        self._ask(account, 0, stage, now)
        account.again = True

    def settle(self, now: float) -> list[Account]:
        """Grants what there is, and asks for what is missing; the accounts that have to be told."""
        told: dict[Account, None] = {account: None for account in self.accounts if account.again}
        for account in self.accounts:
            late = account.give is not None and now - account.asked > PATIENCE
            late |= account.probed > account.reported and now - account.probed > PATIENCE
            if late or (account.lost and account.give is not None):
                account.silent = account.reported < max(account.asked, account.probed) or account.lost
                self._answered(account, now)
        for account in self._wanting():
            if self._grant(account):
                told[account] = None
        for account in self.accounts:
            if account.lease > account.at_most and account.give is None and now >= account.rest and not account.silent:
                self._ask(account, account.at_most, "all", now)
                told[account] = None
        told |= dict.fromkeys(self._reduce(now))
        for account in self._wanting():
            asked, waits = self._find(account, now)
            told |= dict.fromkeys(asked)
            if not asked and not waits and not account.short:
                account.short = True
                told[account] = None
        for account in told:
            account.number += 1
            account.sent, account.again = now, False
        return list(told)

    def due(self, now: float) -> float | None:
        """Seconds until `settle` may have something to do although nothing was reported; None: never."""
        times = [account.asked + PATIENCE for account in self.accounts if account.give is not None]
        if self.wanting or self.available < 0 or any(a.lease > a.at_most for a in self.accounts):
            times += [account.rest for account in self.accounts if account.rest > now]
            times += [a.probed + PATIENCE for a in self.accounts if a.probed > a.reported and not a.silent]
        return max(0.001, min(times) - now) if times else None

    def message(self, account: Account) -> dict[str, Any]:
        """The fields of the message that tells a borrower its lease."""
        return {
            "number": account.number,
            "lease": account.lease,
            "at_least": account.at_least,
            "at_most": account.at_most,
            "wish": account.wish,
            "short": account.short,
            "give": account.give,
            "stage": account.stage,
        }

    @property
    def wanting(self) -> bool:
        """Whether anybody wants more than they have."""
        return any(True for _ in self._wanting())

    def top(self) -> dict[str, Any]:
        """What `vattn pool top` shows."""
        return {
            "budget": self.budget,
            "free": self.available,
            "kept": self.kept,
            "borrowers": [
                {
                    "name": account.name,
                    **{name: getattr(account, name) for name in ("at_least", "at_most", "lease", "want", "owned")},
                    **{name: getattr(account, name) for name in ("parked", "cached", "found", "asked_back", "lost")},
                    "shared": account.shared,
                    "asked": 0 if account.give is None else account.lease - account.give,
                    "page": account.page,
                }
                for account in self.accounts
            ],
        }

    def check(self) -> None:
        """Asserts what has to hold of the books alone."""
        names = [account.name for account in self.accounts]
        assert len(set(names)) == len(names), "two borrowers have one name"
        for account in self.accounts:
            assert account.lease % account.page == 0, "a lease is no number of pages"
            assert account.give is None or (0 <= account.give <= account.lease and account.stage in STAGES)
            assert account.heard <= account.number, "a borrower has seen what was never sent"
        assert sum(account.at_least for account in self.accounts) <= self.budget, "more is guaranteed than there is"

    # How much, and from whom

    def _wanting(self) -> Iterator[Account]:
        """Those that want more than they have: first those that claim their guarantee, then those that wait longest."""
        found = [account for account in self.accounts if account.goal > account.lease and not account.lost]
        yield from sorted(found, key=lambda a: (not a.claims, -a.urgent, a.waiting_since))

    def _grant(self, account: Account) -> bool:
        """Raises a lease as far as there is memory that nobody has."""
        if account.give is not None:
            return False
        more = min(account.goal - account.lease, max(0, self.available)) // account.page * account.page
        if more <= 0:
            return False
        account.lease += more
        account.short = False
        return True

    @property
    def _coming(self) -> int:
        """Bytes that borrowers are asked for."""
        return sum(account.lease - account.give for account in self.accounts if account.give is not None)

    def _reduce(self, now: float) -> list[Account]:
        """Asks for what no request uses while there is more than the budget; whom."""
        over = -self.available - self._coming
        if over > 0:
            over -= self._evict(over)
        asked = []
        for account in sorted(self.accounts, key=lambda account: account.oldest or 0):
            idle = account.unused + account.parked + account.cached
            if over <= 0 or idle in (0, account.idle) or account.give is not None:
                continue
            if account.lost or account.silent:
                continue
            amount = min(-(-min(idle, over) // account.page) * account.page, account.lease)
            self._ask(account, account.lease - amount, "cached", now)
            asked.append(account)
            over -= amount
        return asked

    def _evict(self, num_bytes: int) -> int:
        """Has so many kept bytes given up, or as many as may be; returns how many."""
        amount = min(num_bytes, self.evictable)
        self.evict += amount
        self.evictable -= amount
        return amount

    def _find(self, asker: Account, now: float) -> tuple[list[Account], bool]:
        """Asks others for what a borrower lacks, or what they have; whom, and whether an answer is on its way."""
        coming = self._coming
        missing = asker.goal - asker.lease - max(0, self.available) - coming
        all_others = [
            account
            for account in self.accounts
            if account is not asker and account.give is None and not (account.lost or account.silent)
        ]
        # Not from who needs more itself, or it would go to and fro.
        others = [a for a in all_others if not (a.goal > a.lease and a.urgent >= asker.urgent)]
        asked: list[Account] = []

        def ask(account: Account, amount: int, stage: str) -> None:
            nonlocal missing
            if now < account.rest and STAGES.index(stage) <= account.rested:
                return
            amount = min(-(-min(amount, missing) // account.page) * account.page, account.lease)
            if amount > 0:
                self._ask(account, account.lease - amount, stage, now)
                missing -= amount
                asked.append(account)

        for account in others:
            # Who can do without leaves others what they have ahead of need, which is up to two chunks.
            kept = (NEEDED - asker.urgent) * account.chunk
            if missing > 0 and account.unused > kept:
                ask(account, account.unused - kept, "free")
        for account in others:
            if missing > 0 and account not in asked and account.parked:
                ask(account, account.unused * (asker.urgent == NEEDED) + account.parked, "parked")
        waits = coming > 0
        if missing > 0 and self.evictable > 0:
            missing -= self._evict(missing)
            waits = True
        old = [account for account in others if account not in asked and account.cached and account.oldest is not None]
        mine = asker.oldest if asker.cached else None
        # In parts where the next oldest may be another's: each part is a round trip.
        parts = 1 if sum(account.cached > 0 for account in self.accounts) == 1 else 4
        for account in sorted(old, key=lambda account: account.oldest or 0):
            if missing > 0 and (mine is None or (account.oldest or 0) < mine):
                ask(account, min(account.cached, max(account.chunk, missing // parts)), "cached")
        if asker.claims:
            missing = min(missing, asker.at_least - asker.lease - coming)
            for account in sorted(all_others, key=lambda account: account.at_least - account.lease):
                if missing > 0 and account not in asked and account.lease > account.at_least:
                    ask(account, account.lease - account.at_least, "all")
        if missing > 0 and not asked:  # what is known may be out of date
            for account in self.accounts:
                if account is asker or account.lost or account.silent or account.give is not None:
                    continue
                if account.reported >= asker.wished:
                    continue
                if account.probed < asker.wished:
                    account.probed = now
                    asked.append(account)
                waits = True
        return asked, waits

    def _answered(self, account: Account, now: float) -> None:
        if account.give is not None and account.stage is not None and account.lease > account.give:
            account.rest, account.rested = now + REST, STAGES.index(account.stage)
            account.idle = account.unused + account.parked + account.cached
        account.give = account.stage = None

    def _ask(self, account: Account, level: int, stage: str, now: float) -> None:
        account.give, account.stage, account.asked = level, stage, now

    def _rounded(self, at_least: int, at_most: int | None, page: int) -> tuple[int, int]:
        """Limits in whole pages, the upper one within the budget."""
        most = self.budget if at_most is None else min(at_most, self.budget)
        return -(-at_least // page) * page, most // page * page

    def _affordable(self, least: int, most: int, page: int, but: Account | None) -> int:
        """What of a guarantee is left in a budget that is smaller than the one that it was given in."""
        return min(least, most, max(0, self.budget - self._guaranteed(but))) // page * page

    def _guaranteed(self, but: Account | None) -> int:
        """Bytes that all others are guaranteed."""
        return sum(account.at_least for account in self.accounts if account is not but)

    def _check_limits(self, least: int, most: int, page: int, but: Account | None, at_most: int | None) -> None:
        if most < page:
            asked = self.budget if at_most is None else at_most
            raise ConfigError(f"at most {format_bytes(asked)} is below one page of {format_bytes(page)}")
        if least > most:
            raise ConfigError(f"at least {format_bytes(least)} is more than at most {format_bytes(most)}")
        guaranteed = self._guaranteed(but)
        if guaranteed + least > self.budget:
            raise ConfigError(
                f"at least {format_bytes(least)} cannot be guaranteed: of the pool's {format_bytes(self.budget)}, "
                f"{format_bytes(guaranteed)} are guaranteed to others; give less, or lower theirs (vattn pool limit)"
            )
