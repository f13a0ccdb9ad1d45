"""What caches would hold, before there is one: paged by block size beside virtual by layout and page size.

It is arithmetic over `vattn.layout`, which real caches follow, and touches no memory. A paged cache is computed in the
same way: its block is a page in which all layers of a token lie together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vattn import drivers
from vattn.config import KVConfig, build_layout, candidates, choose, most_waste_share
from vattn.errors import ConfigError
from vattn.groups import MOST_TOKENS, TensorGroup, check_int
from vattn.integers import shown
from vattn.layout import LAYOUTS, Band, Layout, LayoutName, TensorKind
from vattn.units import format_bytes

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
PAGE_SIZES = tuple(2**power for power in range(16, 22))

_BASELINE = 16  # tokens of a block: the default of vLLM, and of the engine's paged backend
_CUDA_PAGES = tuple(2**21 * pages for pages in range(1, 33))  # those of `CudaDevice`; the paper changed NVIDIA's driver
_TABLE_ENTRY = 4  # bytes of a block's number
_PAGE_ENTRY = 8  # bytes of an entry of the device's page table, which has one per page
_LEAST_PAGE = 4096  # the host's page table has an entry for each of these, whatever vattn's page size is
_LENGTHS = 1024  # how many lengths stand for all

# Paged is recommended where, of the requests that may run at a time, virtual holds less than this share of paged's.
_LEAST_REQUESTS = 0.9


@dataclass(frozen=True)
class Option:
    """A cache of one block size, or of one layout and page size. Bytes are those of one device.

    Attributes:
        kind: "paged" or "virtual".
        layout: the layout of a virtual cache.
        page_size: bytes of a page of a virtual cache, of a block of a paged one.
        block_tokens: tokens per page or block; 0 where a token is larger than a page.
        longest_requests: requests of `max_context_len` tokens that fit at a time.
        typical_requests: requests of the lengths given that fit at a time, on average.
        mean_waste: bytes that a request of the lengths given holds unused, on average.
        worst_waste: the most bytes that a request can hold unused.
        held_bytes: bytes that a request of the lengths given holds, on average.
        table_bytes: of the block table that every kernel reads; or of the page table, which the hardware reads.
        address_bytes: bytes of address space.
        map_calls_per_token: pages mapped per token of a request that finds no mapped page; 0 for paged.
        mappings: the most entries that the memory takes in the kernel's table of mappings; None without such a limit.
        offered: whether the device's driver has pages of this size.
    """

    kind: Literal["paged", "virtual"]
    layout: LayoutName | None
    page_size: int
    block_tokens: int
    longest_requests: int
    typical_requests: int
    mean_waste: float
    worst_waste: int
    held_bytes: float
    table_bytes: int
    address_bytes: int
    map_calls_per_token: float
    mappings: int | None
    offered: bool

    def __str__(self) -> str:
        if self.kind == "paged":
            return f"paged, blocks of {self.block_tokens} token{'s' * (self.block_tokens > 1)}"
        return f"virtual, layout {self.layout!r}, pages of {format_bytes(self.page_size)}"


@dataclass(frozen=True)
class Plan:
    """What every option holds, and which one to take.

    Attributes:
        token_bytes: bytes of a token in all layers, on one device.
        mean_tokens: mean of the lengths.
        options: paged by block size, then virtual by layout and page size.
        recommended: one of them.
        reason: why, in a sentence or two.
    """

    device: str
    memory_bytes: int
    max_context_len: int
    max_batch_size: int
    token_bytes: int
    mean_tokens: float
    options: tuple[Option, ...]
    recommended: Option
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values; `recommended` is an index into `options`."""
        return asdict(self) | {
            "options": [asdict(option) for option in self.options],
            "recommended": self.options.index(self.recommended),
        }


def plan(
    groups: Sequence[TensorGroup],
    *,
    memory: int,
    max_context_len: int,
    max_batch_size: int = 64,
    lengths: Sequence[int] | None = None,
    device: str = "cuda",
    block_sizes: Sequence[int] = BLOCK_SIZES,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> Plan:
    """Compares the ways to hold a KV cache in `memory` bytes of one device, which need not be there.

    Args:
        groups: what a token stores on one device, with element types; see `vattn.model_shapes`.
        memory: bytes for the cache: what weights and activations leave.
        max_context_len: most tokens of a request.
        max_batch_size: most requests at a time, for which virtual reserves addresses and paged has a block table.
        lengths: tokens of requests while they run; by default all lengths up to `max_context_len` are as likely.
        device: "cuda" or "cpu", which decide the order of heads and tokens, and the page sizes that there are.
        block_sizes: tokens of a paged block.
        page_sizes: bytes of a page.

    Raises:
        ConfigError: a number out of range, or a device without a driver.
    """
    config = KVConfig(groups=groups, max_batch_size=max_batch_size, max_context_len=max_context_len, device=device)
    memory = check_int("memory", memory, at_least=1, at_most=2**60)
    of_requests = _evenly(config.max_context_len) if lengths is None else lengths
    load = Counter(_checked("lengths", of_requests, at_most=config.max_context_len))
    if not load:
        raise ConfigError("lengths are empty; give the tokens of one request or more, or leave them out")
    block_sizes = _checked("block_sizes", block_sizes, at_most=MOST_TOKENS)
    page_sizes = _checked("page_sizes", page_sizes, at_most=2**40)
    for page_size in page_sizes:
        if drivers.parse(device).type == "cpu":
            drivers.find("cpu").check_page_size(page_size)
        elif page_size % _LEAST_PAGE:
            raise ConfigError(f"page_sizes={page_size} must be a multiple of {_LEAST_PAGE} bytes")
    planner = _Planner(config, load, memory)
    automatic = planner.automatic()
    best, baseline = planner.virtual(automatic), planner.paged(_BASELINE)
    options = [planner.paged(size) for size in block_sizes]
    options += [planner.virtual(build_layout(config, name, size)) for name in LAYOUTS for size in page_sizes]
    for needed in (baseline, best):
        if needed not in options:
            options.append(needed)
    at_once = [min(config.max_batch_size, option.typical_requests) for option in (best, baseline)]
    recommended = best if at_once[0] >= _LEAST_REQUESTS * at_once[1] else baseline
    return Plan(
        device=device,
        memory_bytes=memory,
        max_context_len=config.max_context_len,
        max_batch_size=config.max_batch_size,
        token_bytes=automatic.bytes_per_token,
        mean_tokens=sum(count * tokens for tokens, count in load.items()) / load.total(),
        options=tuple(options),
        recommended=recommended,
        reason=_reason(best, baseline, recommended, config),
    )


def _checked(name: str, values: Iterable[int], *, at_most: int) -> list[int]:
    """Whole numbers from 1 on, as a list of `int`: products of NumPy's wrap around, and JSON does not know them.

    Raises:
        ConfigError: they are not, or one is out of range.
    """
    try:
        given = list(values)
    except Exception as error:  # iterating over a caller's object may raise anything
        raise ConfigError(f"{name}={shown(values)} must be a list of whole numbers: {error}") from error
    return [check_int(name, value, at_least=1, at_most=at_most) for value in given]


class _Planner:
    """The arithmetic for one model, device, memory and load."""

    def __init__(self, config: KVConfig, load: Counter[int], memory: int) -> None:
        self._config = config
        self._load = load
        self._memory = memory
        host = drivers.find("cpu")
        self._on_host = drivers.parse(config.device).type == "cpu"
        self._pages = host.page_sizes if self._on_host else _CUDA_PAGES
        self._mapping_limit = host.mapping_limit() if self._on_host else None
        self._live = self._mean(lambda length: _live(config.tensor_groups, length))

    def automatic(self) -> Layout:
        """What a cache with `layout="auto"` and `page_size="auto"` would have."""
        return choose(
            candidates(self._config, self._pages),
            self._memory,
            self._mapping_limit,
            cheap=self._on_host,
            share=most_waste_share(self._config.device),
        )

    def paged(self, block_size: int) -> Option:
        config = self._config
        # Any layout has the bands; of the same tokens, a paged cache makes blocks.
        bands = [self._in_blocks(band, block_size) for band in self.automatic().bands]
        blocks = -(-config.max_context_len // block_size)
        return Option(
            kind="paged",
            layout=None,
            page_size=sum(band.kinds[0].page_size for band in bands),
            block_tokens=block_size,
            worst_waste=sum((block_size - 1) * band.token_bytes * (1 + (band.window is not None)) for band in bands),
            table_bytes=config.max_batch_size * blocks * len(bands) * _TABLE_ENTRY,
            address_bytes=self._memory,
            map_calls_per_token=0.0,
            mappings=None,
            offered=True,
            **self._requests(bands),
        )

    def virtual(self, layout: Layout) -> Option:
        pages = layout.budget_pages(self._memory)
        mapped, tokens = (
            sum(count * each(length) for length, count in self._load.items()) for each in (layout.pages, int)
        )
        return Option(
            kind="virtual",
            layout=layout.name,
            page_size=layout.page_size,
            block_tokens=layout.page_tokens,
            # The guard rows of a window are backed, and no query needs them.
            worst_waste=layout.worst_waste + sum(band.window_guard * band.token_bytes for band in layout.bands),
            table_bytes=pages * (layout.page_size // _LEAST_PAGE if self._on_host else 1) * _PAGE_ENTRY,
            address_bytes=layout.reserved_bytes,
            map_calls_per_token=mapped / tokens,
            mappings=layout.mappings(pages) if self._on_host else None,
            offered=layout.page_size in self._pages,
            **self._requests(layout.bands),
        )

    def _requests(self, bands: Sequence[Band]) -> dict[str, Any]:
        """The fields that say how many requests fit, and what they leave unused."""
        longest = sum(band.most_pages(self._config.max_context_len) * band.kinds[0].page_size for band in bands)
        held = self._mean(lambda length: _held(bands, length))
        return {
            "longest_requests": self._memory // longest,
            "typical_requests": int(self._memory / held),
            "mean_waste": held - self._live,
            "held_bytes": held,
        }

    def _mean(self, of: Callable[[int], int]) -> float:
        """Over the requests, by their lengths."""
        return sum(count * of(length) for length, count in self._load.items()) / self._load.total()

    def _in_blocks(self, band: Band, block_size: int) -> Band:
        blocks = -(-self._config.max_context_len // block_size)
        block = TensorKind(1, 1, band.token_bytes, blocks, block_size * band.token_bytes)
        window = None if band.window is None else band.window - band.window_guard
        return replace(band, window=window, kinds=(block,), block_tokens=block_size, window_guard=0)


def _held(bands: Sequence[Band], tokens: int) -> int:
    """Bytes of a request of `tokens` tokens while it decodes. The pages of a band are all of one size."""
    return sum(band.pages(tokens, tokens - 1) * band.kinds[0].page_size for band in bands)


def _live(groups: Sequence[TensorGroup], tokens: int) -> int:
    """Bytes of the tokens that its next query sees."""
    return sum(min(tokens, group.sliding_window or tokens) * group.token_bytes for group in groups)


def _evenly(most: int) -> range:
    """Lengths up to `most`, by an odd step, so that all places in a block or page are as likely."""
    return range(1, most + 1, most // _LENGTHS | 1)


def _reason(best: Option, baseline: Option, recommended: Option, config: KVConfig) -> str:
    longest = f"{config.max_context_len:,} tokens"
    if not recommended.longest_requests:
        need = format_bytes(_live(config.tensor_groups, config.max_context_len))
        return f"No request of {longest} fits: it takes {need} and more. Give more memory, or a shorter limit."
    fits = f"{recommended.typical_requests:,} requests of these lengths"
    if recommended is baseline:
        return (
            f"{fits} fit in blocks, {best.typical_requests:,} in pages of {format_bytes(best.page_size)}, of which "
            f"each leaves {format_bytes(best.mean_waste)} unused. The price is a block table in every kernel."
        )
    text = (
        f"{fits} fit, {baseline.typical_requests:,} in blocks of {baseline.block_tokens}; each leaves "
        f"{format_bytes(best.mean_waste)} of {format_bytes(best.held_bytes)} unused. Kernels read contiguous rows, "
        "without a block table."
    )
    if recommended.longest_requests < config.max_batch_size:
        text += f" Of {config.max_batch_size} requests at a time, {recommended.longest_requests} can have {longest}."
    return text
