"""What /proc says that a process holds: memory, addresses, descriptors, threads; not what the library says of it.

    before = books.read()  # of this process, or of another: books.read(pid)
    ...
    assert not books.left(before), books.left(before)

The library keeps its ranges of addresses out of children and of core dumps, and asks the kernel to reserve no memory
for them; its pages are files named `vattn`. So its ranges can be told from those of everybody else.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Literal

from vattn import _native

Pid = int | Literal["self"]
_FILE = "/memfd:vattn"
_GRANULARITIES = 10  # page sizes from 4 KiB to 2 MiB, each of which has a file, which stays open


@dataclass(frozen=True)
class Books:
    """What a process holds.

    Attributes:
        page_bytes: memory in files of pages.
        page_ranges: entries of the kernel's table of mappings that show pages.
        reservations: entries of that table that keep addresses for pages.
        descriptors: open descriptors, by what they refer to, without files of pages.
        threads: threads.
        files: files of pages; at most one for each page size. They stay open, so they are not compared.
        resident_bytes: memory in use, shared memory included; not compared.
    """

    page_bytes: int
    page_ranges: int
    reservations: int
    descriptors: Counter[str]
    threads: int
    files: int = field(compare=False)
    resident_bytes: int = field(compare=False)


def read(pid: Pid = "self") -> Books:
    """What a process holds now. It takes some 30 ms: the kernel looks at every page."""
    page_ranges, reservations = _ranges(pid)
    descriptors, sizes = _descriptors(pid)
    return Books(
        page_bytes=sum(sizes.values()),
        page_ranges=page_ranges,
        reservations=reservations,
        descriptors=descriptors,
        threads=len(os.listdir(f"/proc/{pid}/task")),
        files=len(sizes),
        resident_bytes=_resident(pid),
    )


def left(before: Books, pid: Pid = "self", *, ignore: Collection[str] = (), seconds: float = 2.0) -> str:
    """What a process holds beyond what it held before, or lacks of it; empty if nothing.

    Args:
        ignore: names of attributes that may differ.
        seconds: to wait for what ends soon: the kernel lists a thread for a moment after it was joined.
    """
    end = time.monotonic() + seconds
    while found := _differences(before, read(pid), ignore):
        if time.monotonic() > end:
            return found
        time.sleep(0.05)
    return ""


def disagreement() -> str:
    """Where the library's own counts, of this process, are not what the kernel says; empty if nowhere.

    No call may be in progress. A worker that makes memory ahead of need is waited for.
    """
    for _ in range(20):
        held, now, then = _native.host_usage(), read(), _native.host_usage()
        if held.physical_bytes == then.physical_bytes:
            break
    wrong = []
    if held.physical_bytes != now.page_bytes:
        wrong.append(f"{held.physical_bytes} bytes of pages in the library's books, {now.page_bytes} in its files")
    # The kernel joins neighbouring reservations, which the library counts one by one.
    if (ranges := now.page_ranges + now.reservations) > held.kernel_mappings:
        wrong.append(f"{held.kernel_mappings} mappings in the library's books, {ranges} in the kernel's")
    if now.files > _GRANULARITIES:
        wrong.append(f"{now.files} files of pages; there is one for each page size")
    return "; ".join(wrong)


def _differences(before: Books, now: Books, ignore: Collection[str]) -> str:
    wrong = []
    for name in (each.name for each in fields(Books) if each.compare and each.name not in ignore):
        old, new = getattr(before, name), getattr(now, name)
        if isinstance(old, Counter):
            wrong += [f"{name}: {new[what] - old[what]:+} of {what}" for what in old | new if new[what] != old[what]]
        elif new > old or (new < old and name != "threads"):  # one from before may have ended meanwhile
            wrong.append(f"{name}: {old} -> {new}")
    return "; ".join(wrong)


def _ranges(pid: Pid) -> tuple[int, int]:
    """Ranges that show pages, and ranges that are kept for some."""
    pages = reservations = 0
    named = False
    with open(f"/proc/{pid}/smaps") as table:
        for line in table:
            key, _, rest = line.partition(" ")
            if not key.endswith(":"):
                named = _FILE in rest
            elif key == "VmFlags:" and {"dc", "dd"}.issubset(flags := rest.split()):
                pages += named
                reservations += not named and "nr" in flags
    return pages, reservations


def _descriptors(pid: Pid) -> tuple[Counter[str], dict[int, int]]:
    """Open descriptors by what they refer to, and the bytes of files of pages by inode."""
    found: Counter[str] = Counter()
    sizes: dict[int, int] = {}
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        try:
            target, status = os.readlink(f"{folder}/{number}"), os.stat(f"{folder}/{number}")
        except FileNotFoundError:
            continue  # it lists the folder, or was closed meanwhile
        if target.startswith(_FILE):
            sizes[status.st_ino] = status.st_blocks * 512
        else:
            found[target] += 1
    return found, sizes


def _resident(pid: Pid) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
