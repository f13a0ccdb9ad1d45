"""One budget of physical memory for the engines of one machine.

Every engine may have as many blocks as the whole budget holds. A file in shared memory says how much each of them has
backed, and its lock makes an engine's decision one with what it writes there. An entry whose process is gone counts no
more.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vattn.errors import ConfigError
from vattn.units import parse_bytes


class SharedBudget:
    """The part of one engine in a budget that several share.

    Args:
        text: a name that the engines of the budget have in common, a colon, and a size: `"chat:4GiB"`.

    Raises:
        ConfigError: it is no such text.
    """

    def __init__(self, text: str) -> None:
        name, colon, size = text.rpartition(":")
        if not colon or not re.fullmatch(r"[\w.-]{1,64}", name):
            raise ConfigError(f"vattn: shared_budget={text!r} is not NAME:SIZE, such as 'chat:4GiB'")
        self.total = parse_bytes(size, "shared_budget")
        self._path = Path("/dev/shm") / f"vattn-budget-{os.getuid()}-{name}"
        self._key = str(os.getpid())

    @contextmanager
    def deciding(self) -> Iterator[Share]:
        """What the engine may have, which no other engine changes within the context."""
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            used: dict[str, int] = json.loads(text) if text else {}
            used = {pid: size for pid, size in used.items() if Path("/proc", pid).exists()}
            share = Share(self.total - sum(size for pid, size in used.items() if pid != self._key))
            yield share
            if share.used is not None:
                used[self._key] = share.used
                file.truncate(0)
                file.write(json.dumps(used))


class Share:
    """What one engine may have of a budget at a moment.

    Attributes:
        most: bytes that it may have in all.
        used: bytes that it will have, for the others to see; None if that is as before.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used: int | None = None
