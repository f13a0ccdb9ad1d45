"""What a cache holds and has done, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from vattn.units import format_bytes


@dataclass(frozen=True)
class CallStats:
    """Calls of one kind to the driver, and the seconds they took."""

    count: int
    seconds: float


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of a cache: `owned + parked + cached + other + free == budget`, in pages.

    Attributes:
        page_size: bytes of a page.
        budget_pages: the most that may be mapped.
        owned_pages: that running requests have; shared ones count once.
        parked_pages: still mapped, for no request, and in no cached token block.
        cached_pages: of cached token blocks that no running request uses; they need not be mapped.
        shared_pages: that several running requests have: a part of the owned ones.
        other_pages: held by other caches on the same pool.
        free_pages: held by nobody.
        created_pages: pages that exist, free ones kept for the next use included: physical memory of the pool.
        peak_mapped_pages: most pages that were owned, parked and cached at once.
        reserved_bytes: address space of the virtual tensors.
        live_tokens: tokens in the running slots, as last given to `step`.
        live_bytes: bytes of K and V of those tokens; shared ones count once.
        query_tokens: tokens of all prompts that were admitted.
        hit_tokens: those of them that were in the prefix cache.
        kernel_mappings: entries in the kernel's table of mappings, of all caches in the process (host driver).
        calls: driver calls by CUDA's names, of the whole pool.
        steps: calls of `step`.
        step_seconds: time spent in them.
        waits: times that a step waited for the driver.
        wait_seconds: time spent waiting.
        failures: transactions of the pool that a driver call failed, and that were taken back.
    """

    page_size: int
    budget_pages: int
    owned_pages: int
    parked_pages: int
    cached_pages: int
    shared_pages: int
    other_pages: int
    free_pages: int
    created_pages: int
    peak_mapped_pages: int
    reserved_bytes: int
    live_tokens: int
    live_bytes: int
    query_tokens: int
    hit_tokens: int
    kernel_mappings: int
    steps: int
    step_seconds: float
    waits: int
    wait_seconds: float
    failures: int
    calls: dict[str, CallStats] = field(default_factory=dict)

    @property
    def mapped_pages(self) -> int:
        """Pages that this cache holds: nearly all of them mapped under its slots."""
        return self.owned_pages + self.parked_pages + self.cached_pages

    @property
    def mapped_bytes(self) -> int:
        """The same in bytes."""
        return self.mapped_pages * self.page_size

    @property
    def owned_bytes(self) -> int:
        """Bytes mapped under running requests."""
        return self.owned_pages * self.page_size

    @property
    def parked_bytes(self) -> int:
        """Bytes mapped under slots that no request has."""
        return self.parked_pages * self.page_size

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nobody holds."""
        return self.free_pages * self.page_size

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        return self.budget_pages * self.page_size

    @property
    def created_bytes(self) -> int:
        """Physical memory of the pool in bytes."""
        return self.created_pages * self.page_size

    @property
    def peak_mapped_bytes(self) -> int:
        """Most bytes that were mapped at once."""
        return self.peak_mapped_pages * self.page_size

    @property
    def waste(self) -> float:
        """Share of the running requests' pages that holds no live token, 0 to 1."""
        return 1 - self.live_bytes / self.owned_bytes if self.owned_bytes else 0.0


@dataclass(frozen=True)
class Capacity:
    """What fits a cache's budget; as text, for people.

    Attributes:
        budget_bytes: the budget.
        requests: most requests at a time: slots that can have their first token block together.
        tokens: most tokens at a time, in the fewest requests.
        longest_context: most tokens of a request that is alone.
    """

    budget_bytes: int
    requests: int
    tokens: int
    longest_context: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.budget_bytes)} hold {self.tokens:,} tokens: of up to {self.requests:,} requests at a "
            f"time, of up to {self.longest_context:,} tokens"
        )


@dataclass(frozen=True)
class SlotPages:
    """One slot of a cache, in tokens.

    Attributes:
        reqid: the slot.
        active: a request has it; otherwise what is mapped is parked.
        length: live tokens.
        mapped: tokens that are backed.
        pages: pages mapped.
    """

    reqid: int
    active: bool
    length: int
    mapped: int
    pages: int
