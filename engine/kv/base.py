"""The protocol of the stores for keys and values, and the register of those that there are.

`available()`, `needed()` and `total()` count in the backend's own unit of memory (pages, blocks, tokens or slots). The
units are comparable within one backend only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeVar

from torch import Tensor

from vattn.attention import Blocks, KVSource, PackedBatch, Slots
from vattn.engine.kv.spec import KVCacheDtype, KVSpec
from vattn.prefix import Admission

StoredAs = type[Slots] | type[Blocks] | None


@dataclass(frozen=True)
class KVStats:
    """Memory and driver figures of a backend at one moment.

    `live_bytes <= used_bytes <= physical_bytes`, and `waste_bytes = used_bytes - live_bytes`: memory that a running
    request holds and has no token in.

    Attributes:
        reserved_bytes: address space, of which memory backs only `physical_bytes`.
        physical_bytes, peak_physical_bytes: memory that the backend holds, now and at most.
        used_bytes: of it, what running requests hold; what they share counts once.
        live_bytes: bytes of the tokens that running requests have in the cache; shared ones count once.
        map_calls: driver calls that mapped memory, since the start.
        wait_seconds: time that `prepare` waited for the driver, since the start.
    """

    reserved_bytes: int
    physical_bytes: int
    peak_physical_bytes: int
    used_bytes: int
    live_bytes: int
    map_calls: int = 0
    wait_seconds: float = 0.0

    @property
    def waste_bytes(self) -> int:
        return self.used_bytes - self.live_bytes


class KVBackend(KVSource, Protocol):
    """A store for the keys and values of running requests.

    A slot is one request's: `allocate` or `admit`, then any number of `prepare`, `write` and `read`, then `free`. A
    backend that keeps nothing for later requests inherits `NoPrefixCache`.

    Attributes:
        name: `LLM(kv=name)`.
        kv_cache_dtype: what it stores: "auto" for the model's type.
        stored_as: what `stored` returns; None if a layer is not in one tensor, so that kernels have to `read` request
            by request.
        forgets_windows: tokens behind a layer's window are given back, so that they cannot be copied out.
    """

    name: ClassVar[str]
    kv_cache_dtype: ClassVar[KVCacheDtype]
    stored_as: ClassVar[StoredAs]
    forgets_windows: ClassVar[bool]

    @classmethod
    def from_spec(cls, spec: KVSpec) -> Self:
        """The backend for `spec`: as large as its budget allows, and no larger than can be used.

        Raises:
            ConfigError: it cannot hold such layers, or the budget is below its unit of memory.
        """
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        ...

    @property
    def prefix_block_tokens(self) -> int:
        """Tokens of a block of the prefix cache: `admit` finds a multiple of it."""
        ...

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        """A free slot for a request that is expected to hold `num_tokens`; takes no memory yet.

        Args:
            start: the first token that will be computed; those before it are written back from a copy.

        Raises:
            NoFreeSlot: as many requests hold one as may run, or as slots were made in advance.
        """
        ...

    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        """`allocate` for these tokens, with the longest cached prefix of them in the slot; takes no memory either.

        Args:
            token_ids: what is to be computed: all of the request's tokens, at least one.
            salt: what else their keys and values depend on. Requests with different salts share nothing.

        Returns:
            The slot, and how many tokens at its start are there: fewer than all.

        Raises:
            NoFreeSlot: `max_num_seqs` requests hold one.
            InvalidTokens: ids that are no whole numbers, or a salt that is not bytes.
            InvalidLength: no token, or more than a slot can hold.
        """
        ...

    def commit(self, slot: int, token_ids: Sequence[int]) -> None:
        """Let later requests find the whole token blocks of these tokens, which are stored.

        Args:
            token_ids: all of the request's tokens up to some point.

        Raises:
            InvalidSlot: it is not allocated.
            InvalidTokens: ids that are no whole numbers.
            TokenMismatch: ids that cannot be those of the request.
        """
        ...

    def retract(self, slot: int) -> None:
        """Forget the cached blocks that this slot committed first: later requests must not find them.

        Those that other requests committed, or that the slot was admitted with, stay. A running request that shares a
        block keeps it.

        Raises:
            InvalidSlot: it is not allocated.
        """
        ...

    def fork(self, slot: int) -> int:
        """A second slot with the tokens of the first, written independently from there on.

        Whole token blocks are shared and the rest is copied; a backend that shares nothing copies all.

        Raises:
            InvalidSlot: it is not allocated.
            NoFreeSlot: as for `allocate`.
            OutOfPages: no memory for the copy; nothing changed.
        """
        ...

    def evict_prefixes(self) -> int:
        """Forget every cached block that no running request uses; how many units of memory that frees."""
        ...

    def prepare(self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None) -> None:
        """Make tokens `[0, n)` of each slot writable; what was stored stays.

        Args:
            lengths: slot to n. A slot that is not named keeps what it has. An n that goes down gives nothing back by
                itself, but a backend may use what is above it for other slots. What was above it is written again
                only after a call that says so: rejected drafts are taken back before their request grows.
            next_lengths: what the step after this one will need, where that is more than one token further.

        Raises:
            OutOfPages: the memory does not suffice; nothing changed.
            InvalidSlot: a slot that is not allocated; nothing changed.
        """
        ...

    def free(self, slot: int) -> None:
        """Give the slot back, and its memory, of which cached blocks stay until others need it.

        Raises:
            InvalidSlot: it is not allocated.
        """
        ...

    def retain(self, slots: Collection[int]) -> None:
        """Free all slots but these, whatever an interrupted call left of them; for when nobody knows who holds what."""
        ...

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        """Units that `[0, num_tokens)` takes beyond those that the slot has; all of them for None."""
        ...

    def available(self) -> int:
        """Units that `prepare` may still take."""
        ...

    def total(self) -> int:
        """Units in all."""
        ...

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        """Store one row per token of the batch, which `prepare` has made writable.

        Args:
            key: `[num_tokens, num_kv_heads, head_dim]`, rows in the order of `batch`.
            value: `[num_tokens, num_kv_heads, v_head_dim]`.
        """
        ...

    def copy_out(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, ...]:
        """Copies in the machine's memory of what is stored of tokens `[start, length)`, each `[tokens, ...]`."""
        ...

    def copy_in(self, layer: int, batch: PackedBatch, rows: Sequence[Tensor]) -> None:
        """Store what `copy_out` returned, on the backend's device, as the tokens of `batch`."""
        ...

    def stats(self) -> KVStats: ...

    def check(self) -> None:
        """Assert the backend's conservation law; for tests and idle moments."""
        ...

    def close(self) -> None:
        """Give everything back. After it every call raises or is undefined."""
        ...


Registered = TypeVar("Registered", bound=KVBackend)
REGISTERED: dict[tuple[str, KVCacheDtype], type[KVBackend]] = {}


def register(backend: type[Registered]) -> type[Registered]:
    """A class decorator: `LLM(kv=name, kv_cache_dtype=...)` finds the backend under what it declares."""
    REGISTERED[backend.name, backend.kv_cache_dtype] = backend
    return backend


class PlainStore:
    """What a backend has in common with others that store keys and values as they are."""

    kv_cache_dtype: ClassVar[KVCacheDtype] = "auto"
    forgets_windows: ClassVar[bool] = False

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        raise NotImplementedError

    def copy_out(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, ...]:
        return to_host(*self.read(layer, slot, length, start))

    def copy_in(self, layer: int, batch: PackedBatch, rows: Sequence[Tensor]) -> None:
        self.write(layer, batch, *rows)


def to_host(*heads_first: Tensor) -> tuple[Tensor, ...]:
    """Copies `[tokens, num_kv_heads, *]`, as they are written, of tensors `[1, num_kv_heads, tokens, *]`."""
    return tuple(tensor[0].transpose(0, 1).to("cpu", copy=True) for tensor in heads_first)


class NoPrefixCache:
    """The prefix cache of a backend that has none: nothing is ever found."""

    prefix_block_tokens = 1

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        raise NotImplementedError

    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        return Admission(self.allocate(len(token_ids)), 0)

    def commit(self, slot: int, token_ids: Sequence[int]) -> None:
        pass

    def retract(self, slot: int) -> None:
        pass

    def evict_prefixes(self) -> int:
        return 0
