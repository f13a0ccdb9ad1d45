"""The Python errors for failed driver calls."""

from __future__ import annotations

import errno
import resource

from vattn import _native
from vattn.errors import DriverError, ProcessLimit
from vattn.units import format_bytes

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def failure(call: str, code: int, name: str) -> DriverError:
    """The error for a failed call of a driver or of the native code.

    Args:
        call: the call, by CUDA's name if it has one.
        code: its CUresult, or `_native.HOST_ERRNO` plus an errno of Linux.
        name: name of the code.

    Returns:
        A ProcessLimit with a remedy if a limit of this process is the cause; otherwise a DriverError.
    """
    message = f"{call} failed with {name} ({code})"
    reason = _limit(call, code)
    if reason is None:
        return DriverError(message, call=call, code=code, name=name)
    limit, remedy = reason
    return ProcessLimit(f"{message}: {remedy}", call=call, code=code, name=name, limit=limit)


def _limit(call: str, code: int) -> tuple[str, str] | None:
    """The limit that made a call fail and its remedy; None if no limit did."""
    number = errno.ENOMEM if (call, code) == ("cuMemAddressReserve", _OUT_OF_MEMORY) else code - _native.HOST_ERRNO
    if number == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return "RLIMIT_NOFILE", (
            f"this process has as many files open as RLIMIT_NOFILE allows, {soft}; close some, or raise it "
            f"(ulimit -n; up to {_text(hard)} without privileges)"
        )
    if number == errno.ENFILE:
        return "fs.file-max", "the machine has as many files open as it may; raise it: sysctl fs.file-max"
    if number == errno.EFBIG:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return "RLIMIT_FSIZE", (
            f"RLIMIT_FSIZE allows files of {_text(soft, size=True)}, and the host's pages are in one; raise it "
            "(ulimit -f unlimited), or lower memory_budget"
        )
    if number == errno.ENOMEM:
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            return "address space", (
                "the process has no room for another mapping of this size in its address space; lower max_batch_size "
                "or max_context_len"
            )
        return "RLIMIT_AS", (
            f"RLIMIT_AS allows this process {format_bytes(soft)} of address space, of which a cache takes what all of "
            "its slots could need, not only what is used; raise it (ulimit -v unlimited), or lower max_batch_size or "
            "max_context_len"
        )
    if number == errno.EAGAIN:
        return "RLIMIT_NPROC", (
            "no thread could be started for the worker; end other threads or processes, or raise RLIMIT_NPROC "
            "(ulimit -u) or the control group's pids.max"
        )
    return None


def _text(limit: int, *, size: bool = False) -> str:
    if limit == resource.RLIM_INFINITY:
        return "any number"
    return format_bytes(limit) if size else str(limit)
