"""What can go wrong, as types.

```text
VattnError
|-- ConfigError (ValueError)         a configuration that is unknown, contradictory or cannot fit
|   `-- UnsupportedModel             a model whose attention this library cannot serve
|-- OutOfPages (MemoryError)         the budget cannot back what was asked; nothing changed
|   `-- MappingLimit                 memory is there, but the kernel's table of mappings is full
|-- NoFreeSlot                       max_batch_size requests are running
|-- InvalidLength (ValueError)       a length below 0 or over max_context_len
|-- InvalidTokens (TypeError)       token ids that are no whole numbers, or a salt that is not bytes
|-- TokenMismatch (ValueError)      token ids that cannot be what a request holds
|-- InvalidSlot (KeyError)           a reqid that is out of range or not allocated
|-- CacheClosed                      a call on a cache after close()
|-- ForkedProcess                    a call in a child of the process that made the cache
|-- StreamCapturing                  memory would be mapped or unmapped inside the capture of a CUDA graph
`-- DriverError                      a driver call failed; the cache is as it was before the call
    `-- ProcessLimit                 a limit of this process stopped it (open files, address space), not memory
```
"""

from __future__ import annotations


class VattnError(Exception):
    """Base of every error that vattn raises on purpose."""


class ConfigError(VattnError, ValueError):
    """A configuration value that is unknown, contradictory, or cannot fit."""


class UnsupportedModel(ConfigError):
    """A model whose attention or state the library cannot serve correctly."""


class OutOfPages(VattnError, MemoryError):
    """The budget cannot back the tokens that were asked for; nothing was changed.

    Attributes:
        missing_pages: pages of physical memory short of what was asked.
        missing_bytes: the same in bytes.
    """

    def __init__(self, message: str, *, missing_pages: int, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_pages = missing_pages
        self.missing_bytes = missing_bytes


class MappingLimit(OutOfPages):
    """The operating system's limit on mappings per process would be exceeded; nothing was changed."""


class NoFreeSlot(VattnError):
    """Every slot holds a running request."""


class InvalidLength(VattnError, ValueError):
    """A length that a slot cannot have: below 0 or over `max_context_len`."""


class InvalidTokens(VattnError, TypeError):
    """Token ids that are not whole numbers, or a salt that is not bytes."""


class TokenMismatch(VattnError, ValueError):
    """Token ids that are more or fewer than those a request holds, or others than those it was known to hold."""


class InvalidSlot(VattnError, KeyError):
    """A reqid outside `[0, max_batch_size)`, or one that is not allocated."""

    def __str__(self) -> str:  # KeyError would print the message's repr
        return str(self.args[0])


class CacheClosed(VattnError):
    """The cache was closed; its tensors must not be touched any more."""


class ForkedProcess(VattnError):
    """The cache belongs to the parent of this process; mappings and worker do not survive a fork."""


class StreamCapturing(VattnError):
    """The current stream captures a CUDA graph, and the call would map or unmap memory; nothing was changed."""


class DriverError(VattnError):
    """A call to the memory driver failed; the cache is as it was before the call.

    Attributes:
        call: the driver call, by CUDA's name (`cuMemCreate`).
        code: its CUresult.
        name: CUDA's name for the code (`CUDA_ERROR_OUT_OF_MEMORY`).
    """

    def __init__(self, message: str, *, call: str, code: int, name: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class ProcessLimit(DriverError):
    """A limit of this process stopped a driver call, not a lack of memory; the cache is as it was before the call.

    Attributes:
        limit: its name (`RLIMIT_NOFILE`, `RLIMIT_AS`); the message has the remedy.
    """

    def __init__(self, message: str, *, call: str, code: int, name: str, limit: str) -> None:
        super().__init__(message, call=call, code=code, name=name)
        self.limit = limit
