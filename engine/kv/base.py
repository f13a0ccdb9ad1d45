"""The protocol of the stores for keys and values, and the register of those that there are.

`available()`, `needed()` and `total()` count in the backend's own unit of memory (pages, blocks, tokens or slots). The
units are comparable within one backend only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeVar

from torch import Tensor

from vattn.attention import Blocks, Contiguous, KVSource, PackedBatch
from vattn.broker.borrower import Loan
from vattn.errors import ConfigError
from vattn.prefix import Admission, Key
from vattn.quantised import KVCacheDtype
from vattn.stats import CallStats

from .spec import KVSpec

StoredAs = type[Contiguous] | type[Blocks] | None


@dataclass(frozen=True)
class KVStats:
    """Memory and driver figures of a backend at one moment.

    `live_bytes <= used_bytes <= physical_bytes`, and `waste_bytes = used_bytes - live_bytes`: memory that running
    requests hold without a token in it.

    Attributes:
        reserved_bytes: address space; only `physical_bytes` of it are backed by memory.
        physical_bytes, peak_physical_bytes: memory that the backend holds, now and at its peak.
        used_bytes: the part that running requests need, which no other can have; shared memory counts once.
        live_bytes: bytes of the cached tokens of running requests; shared ones count once.
        map_calls, unmap_calls: driver calls that mapped and unmapped memory, since the start.
        waits, wait_seconds: how often and how long `prepare` waited for the driver, since the start.
    """

    reserved_bytes: int
    physical_bytes: int
    peak_physical_bytes: int
    used_bytes: int
    live_bytes: int
    map_calls: int = 0
    unmap_calls: int = 0
    waits: int = 0
    wait_seconds: float = 0.0

    @property
    def waste_bytes(self) -> int:
        return self.used_bytes - self.live_bytes


def mapping_calls(calls: Mapping[str, CallStats]) -> dict[str, int]:
    """`map_calls` and `unmap_calls` of `KVStats`, of a driver's calls by CUDA's names."""
    names = {"map_calls": "cuMemMap", "unmap_calls": "cuMemUnmap"}
    return {name: calls[call].count if call in calls else 0 for name, call in names.items()}


@dataclass(frozen=True)
class SlotView:
    """The memory of one slot, in tokens.

    Attributes:
        mapped: tokens that it has memory for.
        shared: how many of them, at its start, other slots have in the same memory.
        active: a request has the slot.
        blocks: the numbers of its blocks in the pool, for a backend of blocks.
    """

    slot: int
    mapped: int
    shared: int = 0
    active: bool = True
    blocks: Sequence[int] | None = None


@dataclass(frozen=True)
class KVDescription:
    """Where the memory of a backend is at one moment.

    Attributes:
        slots: those that a request has, or that have memory.
        pages: how many pages are in which state, for a backend of pages.
        num_blocks: blocks of the pool, for a backend of blocks; None for others.
        cached_blocks: numbers of those that no request holds.
    """

    slots: Sequence[SlotView]
    pages: Mapping[str, int] | None = None
    num_blocks: int | None = None
    cached_blocks: Sequence[int] = ()


class KVBackend(KVSource, Protocol):
    """A store for the keys and values of running requests.

    A slot is one request's: `allocate` or `admit`, then any number of `prepare`, `write` and `read`, then `free`. A
    backend that keeps nothing for later requests inherits `NoPrefixCache`.

    Attributes:
        name: `LLM(kv=name)`.
        switch: the key of `kv_options` that chooses this backend, if true, among those of its name; None for the one
            without it.
        kv_cache_dtype: what it stores: "auto" for the model's type.
        stored_as: what `stored` returns; None if a layer is not in one tensor, so that kernels have to `read` request
            by request.
        forgets_windows: tokens behind a layer's window are given back, so that they cannot be copied out.
    """

    name: ClassVar[str]
    switch: ClassVar[str | None]
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
        """Tokens of a block of the prefix cache: running requests share multiples of it."""
        ...

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        """A free slot for a request of about `num_tokens` tokens; takes no memory yet.

        Args:
            start: the first token that will be computed; earlier ones are copied back by `copy_in`.

        Raises:
            NoFreeSlot: all slots are taken.
        """
        ...

    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        """`allocate` for these tokens, with the longest cached prefix of them in the slot; takes no memory either.

        Args:
            token_ids: all of the request's tokens, at least one.
            salt: whatever else their keys and values depend on. Requests with different salts share nothing.

        Returns:
            The slot, and how many tokens at its start are cached: fewer than all.

        Raises:
            NoFreeSlot: `max_num_seqs` requests hold one.
            InvalidTokens: ids that are not whole numbers, or a salt that is not bytes.
            InvalidLength: no token, or more than a slot can hold.
        """
        ...

    def find(self, token_ids: Sequence[int], salt: bytes = b"", *, rows: bool = False) -> int:
        """How many tokens `admit` would find cached in whole blocks, with the same arguments and errors.

        Args:
            rows: count those after the last whole block, too, which the backend keeps where they are.
        """
        ...

    def commit(self, slot: int, token_ids: Sequence[int]) -> None:
        """Publish the whole blocks of these tokens, which are stored, to later requests.

        Args:
            token_ids: all of the request's tokens up to some point.

        Raises:
            InvalidSlot: it is not allocated.
            InvalidTokens: ids that are not whole numbers.
            TokenMismatch: they contradict what is known of the request's tokens.
        """
        ...

    def retract(self, slot: int) -> None:
        """Withdraw the blocks that this slot published, so that later requests do not find them.

        Blocks that were computed on blocks of this slot go too, and none that is computed on them is published; others
        stay, and running requests keep blocks that they share.

        Raises:
            InvalidSlot: it is not allocated.
        """
        ...

    def retract_tokens(self, token_ids: Sequence[int], salt: bytes, since: int) -> None:
        """Withdraw the blocks of these tokens, whichever slot published them, and what was computed on them: for a
        request that had other slots before.

        Args:
            token_ids, salt: as for `admit`.
            since: how many of the tokens are right, whose blocks stay.

        Raises:
            InvalidTokens, InvalidLength: as for `admit`.
        """
        ...

    def take_withdrawn(self) -> Set[Key]:
        """The keys of cached blocks that other processes have found to be wrong, and of what was computed on them,
        since the last call.
        """
        ...

    def fork(self, slot: int) -> int:
        """A second slot with the tokens of the first; writes to one do not change the other.

        Whole blocks are shared and the rest is copied; a backend without sharing copies all.

        Raises:
            InvalidSlot: it is not allocated.
            NoFreeSlot: as for `allocate`.
            OutOfPages: no memory for the copy; nothing changed.
        """
        ...

    def evict_prefixes(self) -> int:
        """Evict every cached block that no running request uses; returns the units of memory that this frees."""
        ...

    def stop_sharing(self) -> None:
        """Share nothing with other processes any more: what is computed may be something else from here on."""
        ...

    def trim(self) -> int:
        """Give the memory that neither requests nor cached blocks use back to the machine; returns its bytes.

        Raises:
            ConfigError: the backend has all its memory from its start to its end.
        """
        ...

    def prepare(
        self, lengths: Mapping[int, int], next_lengths: Mapping[int, int] | None = None, *, look_ahead: bool = True
    ) -> None:
        """Make tokens `[0, n)` of each slot writable; stored tokens stay.

        Args:
            lengths: slot to n; other slots are unchanged. A lower n frees nothing by itself, but the backend may reuse
                memory above it for other slots. Rejected drafts are dropped by such a call before their request grows.
            next_lengths: lengths of the step after this one, where they are more than one token higher.
            look_ahead: decide at once what the steps after this one need; if not, `look_ahead()` will.

        Raises:
            OutOfPages: not enough memory; nothing changed.
            InvalidSlot: a slot that is not allocated; nothing changed.
        """
        ...

    def look_ahead(self) -> None:
        """What `prepare` was told to leave out, if the backend does anything ahead: for when the step is launched."""
        ...

    def free(self, slot: int, token_ids: Sequence[int] | None = None) -> None:
        """Free the slot and its memory; cached blocks stay until their memory is needed.

        Args:
            token_ids: what was committed last, all of it. A backend may keep what follows the last whole block, too,
                where it is.

        Raises:
            InvalidSlot: it is not allocated.
        """
        ...

    def retain(self, slots: Collection[int]) -> None:
        """Free all slots but these, whatever state an interrupted call left them in."""
        ...

    def needed(self, num_tokens: int, slot: int | None = None) -> int:
        """Units that `[0, num_tokens)` needs beyond those that the slot has; without a slot, all."""
        ...

    def available(self) -> int:
        """Units that `prepare` can still take."""
        ...

    def borrow(self, units: int, following: int = 0) -> int:
        """Has so many units more become available, or fewer, if memory is lent, without taking any from requests and as
        far as that is quick; how many did. `following`: units that will be asked for next: they are asked of others
        with these, and not waited for.
        """
        ...

    def total(self) -> int:
        """Units in all."""
        ...

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        """Store one row per token of the batch; `prepare` has made them writable.

        Args:
            key: `[num_tokens, num_kv_heads, head_dim]`, rows in the order of `batch`.
            value: `[num_tokens, num_kv_heads, v_head_dim]`.
        """
        ...

    def homes(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Where `write` stores keys and values, without changing them: `[slots, tokens, heads, dim]` or `[rows, heads,
        dim]` each, which keep their addresses. None if it does otherwise.
        """
        ...

    def places(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """Slots and positions, or rows and None, of the batch's tokens in `homes`: `[num_tokens]` int64 each."""
        ...

    def copy_out(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, ...]:
        """Copies in host memory of what is stored for tokens `[start, length)`, each `[tokens, ...]`."""
        ...

    def copy_in(self, layer: int, batch: PackedBatch, rows: Sequence[Tensor]) -> None:
        """Store what `copy_out` returned, on the backend's device, as the tokens of `batch`."""
        ...

    def stats(self) -> KVStats: ...

    @property
    def loan(self) -> Loan | None:
        """What a broker lends it; None for memory of its own. For any thread, at any time."""
        ...

    @property
    def sharing(self) -> bytes | None:
        """What engines have in common whose caches map each other's prefixes; None if others map none of this one."""
        ...

    @property
    def publishing(self) -> bool:
        """Whether something was committed that other processes do not find yet. For any thread, at any time."""
        ...

    def describe(self) -> KVDescription:
        """Which slot has which memory; takes time in proportion to it, so it is for displays."""
        ...

    def check(self) -> None:
        """Assert the backend's conservation law; for tests and idle moments."""
        ...

    def close(self) -> None:
        """Free everything. Every later call raises or is undefined."""
        ...


Registered = TypeVar("Registered", bound=KVBackend)
REGISTERED: dict[tuple[str, KVCacheDtype, str | None], type[KVBackend]] = {}


def register(backend: type[Registered]) -> type[Registered]:
    """A class decorator: `LLM(kv=..., kv_cache_dtype=..., kv_options=...)` finds the backend under what it declares."""
    REGISTERED[backend.name, backend.kv_cache_dtype, backend.switch] = backend
    return backend


class PlainStore:
    """What a backend has in common with others that store keys and values as they are."""

    switch: ClassVar[str | None] = None
    kv_cache_dtype: ClassVar[KVCacheDtype] = "auto"
    forgets_windows: ClassVar[bool] = False

    name: ClassVar[str]

    @property
    def loan(self) -> Loan | None:
        return None

    @property
    def sharing(self) -> bytes | None:
        return None

    @property
    def publishing(self) -> bool:
        return False

    def stop_sharing(self) -> None:
        pass

    def take_withdrawn(self) -> Set[Key]:
        return frozenset()

    def borrow(self, units: int, following: int = 0) -> int:
        return 0

    def look_ahead(self) -> None:
        pass

    def trim(self) -> int:
        raise ConfigError(
            f"kv={self.name!r} has all its memory from its start to its end; use kv='virtual', or kv='paged' with "
            "kv_options={'windows': True}"
        )

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def write(self, layer: int, batch: PackedBatch, key: Tensor, value: Tensor) -> None:
        raise NotImplementedError

    def homes(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return None

    def places(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        return batch.slots, batch.positions

    def copy_out(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, ...]:
        return to_host(*self.read(layer, slot, length, start))

    def copy_in(self, layer: int, batch: PackedBatch, rows: Sequence[Tensor]) -> None:
        self.write(layer, batch, *rows)


def to_host(*heads_first: Tensor) -> tuple[Tensor, ...]:
    """Copies `[tokens, num_kv_heads, *]`, as they are written, of tensors `[1, num_kv_heads, tokens, *]`."""
    return tuple(tensor[0].transpose(0, 1).to("cpu", copy=True) for tensor in heads_first)


class NoPrefixCache:
    """For a backend without a prefix cache: nothing is ever found."""

    prefix_block_tokens = 1

    def allocate(self, num_tokens: int, start: int = 0) -> int:
        raise NotImplementedError

    def admit(self, token_ids: Sequence[int], salt: bytes = b"") -> Admission:
        return Admission(self.allocate(len(token_ids)), 0)

    def find(self, token_ids: Sequence[int], salt: bytes = b"", *, rows: bool = False) -> int:
        return 0

    def commit(self, slot: int, token_ids: Sequence[int]) -> None:
        pass

    def retract(self, slot: int) -> None:
        pass

    def retract_tokens(self, token_ids: Sequence[int], salt: bytes, since: int) -> None:
        pass

    def evict_prefixes(self) -> int:
        return 0
