"""The borrower's side of a lease, without input or output."""

from __future__ import annotations

from vattn.broker.wire import Message


class Lease:
    """What a borrower may have, in bytes. Only messages of the broker raise it; only the borrower lowers it.

    Attributes:
        level: the most memory that it may have.
        at_least, at_most: the level that it can always get, and the one that it cannot get over, as its operator wants.
        number: of the last message that counted.
        give: the level that the broker asks it to come down to, and the stage; None if it does not.
        answered: the number of the wish that the last message answered.
        short: whether that message said that there is no more to be had.
    """

    def __init__(self) -> None:
        self.level = 0
        self.at_least = self.at_most = 0
        self.number = 0
        self.give: tuple[int, str] | None = None
        self.answered = 0
        self.short = False

    @property
    def allowed(self) -> int:
        """The level that the pool may fill now: not what running requests are to give back."""
        level = min(self.level, self.at_most)
        return min(level, self.give[0]) if self.give is not None and self.give[1] == "all" else level

    def joined(self, message: Message) -> None:
        """Begins with what a broker's `joined` says: what was lent by an earlier one is in it."""
        self._limited(message)
        self.level = max(self.level, message["lease"])
        self.give, self.answered, self.short = None, 0, False

    def received(self, message: Message) -> bool:
        """Takes a message of kind `lease`; False for one that is doubled or late, and changes nothing."""
        if message["number"] <= self.number:
            return False
        self._limited(message)
        self.level = max(self.level, message["lease"])
        self.answered, self.short = message["wish"], message["short"]
        self.give = None if message["give"] is None else (message["give"], message["stage"])
        return True

    def _limited(self, message: Message) -> None:
        self.number, self.at_least, self.at_most = (message[name] for name in ("number", "at_least", "at_most"))

    def wished(self) -> None:
        """Another wish is told, to which the last answer does not apply."""
        self.short = False

    def complied(self) -> None:
        """What was asked back has been given, or cannot be."""
        self.give = None

    def lowered(self, level: int) -> None:
        """Notes that there is no more memory than this, and will not be."""
        self.level = min(self.level, level)
