"""The exceptions that vattn raises.

```text
VattnError
|-- ConfigError (ValueError)         an unknown or contradictory configuration, or one that cannot fit
|   `-- UnsupportedModel             a model whose attention this library cannot serve
|-- OutOfPages (MemoryError)         the budget cannot back the requested tokens; nothing changed
|   `-- MappingLimit                 memory is available, but the kernel's table of mappings is full
|-- NoFreeSlot                       max_batch_size requests are running
|-- InvalidLength (ValueError)       a length below 0 or over max_context_len
|-- InvalidTokens (TypeError)       token ids that are not integers, or a salt that is not bytes
|-- TokenMismatch (ValueError)      token ids that contradict the tokens of a request
|-- InvalidSlot (KeyError)           a reqid that is out of range or not allocated
|-- InvalidBlock (KeyError)          a block number that is out of range, or not backed
|-- CacheClosed                      a call on a cache after close()
|-- ForkedProcess                    a call in a forked child of the process that created the cache
|-- StreamCapturing                  memory would be mapped or unmapped during CUDA graph capture
`-- DriverError                      a driver call failed; the cache is as it was before the call
    `-- ProcessLimit                 it hit a limit of this process (open files, address space), not a lack of memory
```
"""

from __future__ import annotations

from typing import Any


class VattnError(Exception):
    """Base class of all errors that vattn raises deliberately."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the constructor, which may take more than `args`.
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[VattnError], args: tuple[Any, ...]) -> VattnError:
    return Exception.__new__(kind, *args)


class ConfigError(VattnError, ValueError):
    """A configuration value that is unknown, contradicts others, or cannot fit.

    Attributes:
        param: the name of the argument, where it is one that is wrong.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedModel(ConfigError):
    """A model whose attention or state the library cannot serve correctly."""


class OutOfPages(VattnError, MemoryError):
    """The budget cannot back the requested tokens; nothing was changed.

    Attributes:
        missing_pages: the shortfall, in pages of physical memory.
        missing_bytes: the shortfall, in bytes.
        may_pass: whether another process has the memory, of a pool that both have, and may give it back.
    """

    def __init__(self, message: str, *, missing_pages: int, missing_bytes: int, may_pass: bool = False) -> None:
        super().__init__(message)
        self.missing_pages = missing_pages
        self.missing_bytes = missing_bytes
        self.may_pass = may_pass


class MappingLimit(OutOfPages):
    """The operating system's limit on mappings per process would be exceeded; nothing was changed."""


class NoFreeSlot(VattnError):
    """Every slot holds a running request."""


class InvalidLength(VattnError, ValueError):
    """A length that a slot cannot have: below 0 or over `max_context_len`."""


class InvalidTokens(VattnError, TypeError):
    """Token ids that are not integers, or a salt that is not bytes."""


class TokenMismatch(VattnError, ValueError):
    """More or fewer token ids than a request holds, or ids that differ from those it is known to hold."""


class InvalidSlot(VattnError, KeyError):
    """A reqid outside `[0, max_batch_size)`, or one that is not allocated."""

    def __str__(self) -> str:  # KeyError would print the message's repr
        return str(self.args[0])


class InvalidBlock(VattnError, KeyError):
    """A block number outside `[0, num_blocks)`, or of a block that is not backed."""

    def __str__(self) -> str:  # KeyError would print the message's repr
        return str(self.args[0])


class CacheClosed(VattnError):
    """The cache was closed; its tensors must no longer be used."""


class ForkedProcess(VattnError):
    """The cache belongs to the parent of this process; its mappings and its worker do not survive a fork."""


class StreamCapturing(VattnError):
    """A stream is capturing a CUDA graph, and the call would map or unmap memory on it, or wait for all kernels of the
    device; nothing was changed.
    """


class DriverError(VattnError):
    """A call to the memory driver failed; the cache is as it was before the call.

    Attributes:
        call: CUDA's name of the driver call (`cuMemCreate`).
        code: its CUresult.
        name: CUDA's name of the code (`CUDA_ERROR_OUT_OF_MEMORY`).
    """

    def __init__(self, message: str, *, call: str, code: int, name: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class ProcessLimit(DriverError):
    """A driver call hit a limit of this process, not a lack of memory; the cache is as it was before the call.

    Attributes:
        limit: the name of the limit (`RLIMIT_NOFILE`, `RLIMIT_AS`); the message says how to raise it.
    """

    def __init__(self, message: str, *, call: str, code: int, name: str, limit: str) -> None:
        super().__init__(message, call=call, code=code, name=name)
        self.limit = limit
