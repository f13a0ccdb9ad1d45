"""What a broker notes for the next one of its pool: who has which lease."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vattn.broker import wire

Note = dict[str, Any]

_LAST = 5.0  # seconds for the last notes of a broker that ends


class Notes:
    """A file, which a thread writes: a slow disk holds up what has to be noted first, and nothing else.

    Args:
        written: called by the thread when the file has changed, or could not be.

    Attributes:
        trouble: why the file could not be written; empty if it could.
    """

    def __init__(self, path: Path, written: Callable[[], object]) -> None:
        self.trouble = ""
        self._path = path
        self._call = written
        self._changed = threading.Condition()
        self._wanted: list[Note] = []  # at first the file is an earlier broker's, to be read
        self._tried: list[Note] | None = []  # what the file has, or would have if it could be written
        self._leases: dict[str, int] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="vattn notes", daemon=True)
        self._thread.start()

    def write(self, notes: list[Note]) -> None:
        """Has the file say this, in a moment."""
        with self._changed:
            if notes != self._wanted:
                self._wanted, self._tried = notes, None
                self._changed.notify_all()

    def try_again(self) -> None:
        """Writes what could not be written."""
        with self._changed:
            if self.trouble:
                self._tried = None
                self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until the file says what it is to say, or cannot, for at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._tried == self._wanted, seconds)

    def has(self, identity: str, lease: int) -> bool:
        """Whether the file says that a borrower may have as much, or the disk refuses to have it."""
        return bool(self.trouble) or self._leases.get(identity, 0) >= lease

    def read(self) -> list[Note]:
        """What an earlier broker has noted, without what is no note."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            notes = json.loads(self._path.read_bytes())
            if type(notes) is list:
                return [note for note in notes if type(note) is dict and _is_note(note)]
        return []

    def close(self) -> None:
        """Ends the thread once the file says what it is to say, unless the disk is very slow."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_LAST)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tried != self._wanted or self._closing)
                notes = self._wanted
                if self._tried == notes:
                    return
            trouble = ""
            try:
                self._replace(json.dumps(notes).encode())
            except OSError as error:
                trouble = str(error)
            with self._changed:
                self.trouble, self._tried = trouble, notes
                if not trouble:
                    self._leases = {note["identity"]: note["lease"] for note in notes}
                self._changed.notify_all()
            self._call()

    def _replace(self, text: bytes) -> None:
        fresh = self._path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(fresh, flags, 0o600), "wb") as file:
            file.write(text)
        fresh.rename(self._path)


def _is_note(note: Note) -> bool:
    return note.keys() >= wire.NOTE.keys() and all(holds(note[name]) for name, holds in wire.NOTE.items())
