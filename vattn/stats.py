"""Statistics of a cache as plain data."""

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
        owned_pages: pages of running requests; shared ones count once.
        surplus_pages: owned pages that the requests do not need: mapped ahead, or left from a longer request in the
            same slot. Like parked pages, they are for any step that needs them.
        parked_pages: pages still mapped for no request, and in no cached token block.
        cached_pages: pages of cached token blocks that no running request uses; they need not be mapped.
        shared_pages: owned pages that several running requests share.
        shared_read_only: whether a shared page can be written in one slot at most; if not, because the device's driver
            maps no memory read-only, a stray write to a shared page does not fault.
        other_pages: pages of other caches on the same pool.
        free_pages: pages that nobody holds.
        created_pages: physical pages of the pool, including free ones kept for reuse and those in stock.
        stocked_pages: those that the worker has created ahead of need; they count as free.
        peak_mapped_pages: peak of owned, parked and cached pages together.
        reserved_bytes: address space of the virtual tensors.
        live_tokens: tokens in the running slots, as last given to `step`.
        live_bytes: bytes of K and V of those tokens; shared ones count once.
        query_tokens: tokens of all admitted prompts.
        hit_tokens: those found in the prefix cache.
        kernel_mappings: entries in the kernel's table of mappings, of all caches in the process (host driver).
        calls: driver calls by CUDA's names, of the whole pool.
        steps: calls of `step`.
        step_seconds: time spent in `step` and `look_ahead`.
        waits: number of times that a step waited for the driver.
        wait_seconds: time spent waiting.
        failures: transactions of the pool that were rolled back because a driver call failed.
    """

    page_size: int
    budget_pages: int
    owned_pages: int
    surplus_pages: int
    parked_pages: int
    cached_pages: int
    shared_pages: int
    other_pages: int
    free_pages: int
    created_pages: int
    stocked_pages: int
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
    shared_read_only: bool
    calls: dict[str, CallStats] = field(default_factory=dict)

    @property
    def mapped_pages(self) -> int:
        """Pages that this cache holds, nearly all of them mapped."""
        return self.owned_pages + self.parked_pages + self.cached_pages

    @property
    def mapped_bytes(self) -> int:
        """`mapped_pages` in bytes."""
        return self.mapped_pages * self.page_size

    @property
    def owned_bytes(self) -> int:
        """Bytes mapped under running requests."""
        return self.owned_pages * self.page_size

    @property
    def needed_bytes(self) -> int:
        """Bytes that running requests need: `owned_bytes` without the surplus."""
        return (self.owned_pages - self.surplus_pages) * self.page_size

    @property
    def parked_bytes(self) -> int:
        """Bytes mapped under slots without a request."""
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
        """Peak of mapped bytes."""
        return self.peak_mapped_pages * self.page_size

    @property
    def waste(self) -> float:
        """Share of the pages that running requests need which holds no live token, 0 to 1: the ends of last pages."""
        return 1 - self.live_bytes / self.needed_bytes if self.needed_bytes else 0.0


@dataclass(frozen=True)
class Capacity:
    """The requests and tokens that fit a cache's budget, and how they lie in memory; `str` gives a sentence.

    Attributes:
        budget_bytes: the budget.
        requests: most concurrent requests: slots that can have their first token block at the same time.
        tokens: most tokens at a time, in as few requests as possible.
        longest_context: most tokens of a single request that runs alone.
        layout: the layout, given or chosen.
        page_size: bytes of a page, given or chosen.
        page_tokens: whole tokens that a page covers; 0 where a token is larger than a page.
        usual_waste: bytes that a request leaves unused in its last pages, on average.
    """

    budget_bytes: int
    requests: int
    tokens: int
    longest_context: int
    layout: str
    page_size: int
    page_tokens: int
    usual_waste: int

    def __str__(self) -> str:
        pages = f"pages of {format_bytes(self.page_size)}"
        if self.page_tokens:
            pages += f" for {self.page_tokens:,} token{'s' * (self.page_tokens > 1)}"
        return (
            f"{format_bytes(self.budget_bytes)} hold {self.tokens:,} tokens: of up to {self.requests:,} requests at a "
            f"time, of up to {self.longest_context:,} tokens; layout {self.layout}, {pages}, of which a request leaves "
            f"{format_bytes(self.usual_waste)} unused on average"
        )


@dataclass(frozen=True)
class SlotPages:
    """One slot of a cache, in tokens.

    Attributes:
        reqid: the slot.
        active: whether a request holds it; otherwise its mapped pages are parked.
        length: live tokens.
        mapped: tokens that are backed.
        pages: pages mapped.
        shared: tokens at the slot's start whose memory several running requests use.
    """

    reqid: int
    active: bool
    length: int
    mapped: int
    pages: int
    shared: int


@dataclass(frozen=True)
class BlockStats:
    """A snapshot of a `BlockWindows`.

    Attributes:
        page_size: bytes of a page.
        num_blocks: blocks in all.
        backed_blocks, peak_backed_blocks: those that have memory, now and at most so far.
        block_bytes: bytes of a block in all layers.
        shown_blocks: blocks that windows show, counted in each.
        attached_blocks, detached_blocks: blocks that were mapped in windows and unmapped there, since the start.
        shows: calls of `show`.
        reserved_bytes: address space of the blocks and the windows.
        kernel_mappings: entries in the kernel's table of mappings, of the whole process (host driver).
        calls: driver calls by CUDA's names, of the whole pool.
    """

    page_size: int
    num_blocks: int
    backed_blocks: int
    peak_backed_blocks: int
    block_bytes: int
    shown_blocks: int
    attached_blocks: int
    detached_blocks: int
    shows: int
    reserved_bytes: int
    kernel_mappings: int
    calls: dict[str, CallStats] = field(default_factory=dict)

    @property
    def mapped_bytes(self) -> int:
        """Physical memory under blocks."""
        return self.backed_blocks * self.block_bytes

    @property
    def peak_mapped_bytes(self) -> int:
        """The most physical memory that was under blocks."""
        return self.peak_backed_blocks * self.block_bytes
