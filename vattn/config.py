"""The configuration of a cache (`KVConfig`), and its resolution to a layout and a budget here (`resolve`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from vattn import drivers
from vattn.errors import ConfigError
from vattn.groups import (
    MOST_ADDRESSES,
    MOST_LAYERS,
    MOST_SLOTS,
    MOST_TOKENS,
    TensorGroup,
    check_choice,
    check_int,
    is_auto,
    parse_dtype,
)
from vattn.integers import as_real, shown
from vattn.layout import LAYOUTS, KVOrder, Layout, LayoutName, build
from vattn.units import format_bytes, parse_bytes

# An automatic page size covers at least so many tokens, and a token takes at most so many pages: with smaller pages,
# driver calls cost more than the memory that they save. On the host a page takes up to 10 us of the worker's time.
_MIN_PAGE_TOKENS = 16
_MOST_TOKEN_PAGES = 8

# On CUDA it covers the first of these numbers that leaves little unused, in blocks that are short. Calls take 40 us for
# a page of any size, 10 % of a prompt's time in pages of 2 MiB (Llama-3-8B, an H100). Attention reads all as fast.
_CUDA_PAGE_TOKENS = (128, 64, 32, 16, 0)
_CUDA_BLOCK_TOKENS = 256  # shorter blocks are no better

# "layer" has the longest blocks by far. On CUDA "sliced" is read as fast, but for 1 %.
_AUTO_LAYOUTS: dict[str, Sequence[LayoutName]] = {"cpu": LAYOUTS, "cuda": ("sliced", "fused")}

# An automatic layout is the first with which requests leave at most this share of the budget unused when all slots run.
_MOST_WASTE = {"cpu": 1 / 4, "cuda": 1 / 16}

_AUTO_KV_ORDER: dict[str, KVOrder] = {"cpu": "HND", "cuda": "NHD"}

# Rows before a window that kernels read: on CUDA the rest of a tile of up to 256 keys. Zeroed, as guard rows are.
_WINDOW_GUARD = {"cpu": 0, "cuda": 256}


# Options that say what all layers store; `groups` says it in their place.
OF_ONE_GROUP = ("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "sliding_window")


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """The contents, location and behaviour of a cache.

    The shape of a token is given either by `num_layers`, `num_kv_heads` and `head_dim`, if all layers are alike, or by
    `groups`.

    Attributes:
        num_layers: attention layers that keep K and V.
        num_kv_heads: K/V heads of each.
        head_dim: elements of a K head (and of a V head, unless `v_head_dim` says otherwise).
        v_head_dim: elements of a V head, where it differs. 0: layers store K only, one latent say.
        sliding_window: tokens that a query sees, its own included; memory behind them is given back.
        groups: layers that differ in heads, head sizes, element type or window.
        dtype: element type, as torch has it or by name: float32, bfloat16, float16, or an 8-bit type.
        max_batch_size: number of slots, and so of concurrent requests.
        max_context_len: most tokens of a slot. Only address space depends on it.
        device: device of the tensors: "cpu", "cuda" (torch's current GPU) or "cuda:1".
        memory_budget: physical memory that may be mapped, in bytes or as text such as "4GiB"; at most what all slots
            need at full length. "auto" is a share of the device's free memory when the cache is made, so make it after
            loading the model. With a given pool, "auto" is the pool's budget.
        memory_utilization: that share, over 0 and up to 1; the rest is for the model's activations. "auto" is 0.9 on
            CUDA and 0.5 on the host, whose memory is shared with other programs.
        page_size: bytes of a page. On the host a power of two from 4 KiB to 2 MiB; "auto" takes the smallest that
            covers at least 16 tokens, that needs at most 8 pages for a token, and with which the budget takes at most
            half of the kernel's table of mappings. On CUDA a multiple of the device's granularity (2 MiB); "auto" takes
            the smallest, up to 64 MiB, that covers at least 128 tokens and makes short blocks, or fewer tokens where
            that leaves too much unused.
        layout: "layer" (a K and a V tensor per layer), "sliced" (a K and a V tensor for all layers) or "fused" (one
            tensor), in descending order of tokens per page. "auto" takes the first with which the last blocks of
            requests leave at most a quarter of the budget unused when every slot has a request; if there is none, the
            layout and the pages that leave least unused. On CUDA that is a sixteenth, and "layer" is not among them.
        kv_order: "NHD" (the heads of a token are adjacent) or "HND" (the tokens of a head are adjacent). "auto" is HND
            on the CPU, where attention reads it fastest, and NHD on CUDA, whose kernels expect it.
        block_tokens: most tokens that a page may cover. With a fixed page size it determines the layout, with a fixed
            layout the page size.
        guard_rows: rows past a slot's length that a kernel reads without using them. They are backed, and hold zeros or
            what a request wrote in that slot: its pages are zeroed when they are mapped, because new memory on CUDA,
            and memory that other caches used, may hold NaN.
        guard: effect of other reads past the mapped pages on the host: "zero" returns zeros, "strict" faults. On CUDA
            such a read is always an error of the kernel.
        overlap: map the pages for coming steps while this one computes.
        deferred_reclamation: leave a finished request's pages mapped for the next request in that slot.
        eager_pages: pages per run mapped ahead in one idle slot for the next request, and a token block in idle slots
            where a shared prefix is mapped ahead; 0 for none.
        zero_on_free: zero the pages of a request before another one gets them; docs/security.md describes scope and
            cost. Of a finished request, only cached token blocks then stay mapped.
        watermark: share of the budget below which free pages are replenished from finished requests, and up to which
            memory is created ahead with `overlap`; 0 for only on demand.
    """

    max_batch_size: int
    max_context_len: int
    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int | None = None
    groups: Sequence[TensorGroup] | None = None
    dtype: torch.dtype | str | None = None
    device: str | torch.device = "cpu"
    memory_budget: int | str = "auto"
    memory_utilization: float | Literal["auto"] = "auto"
    page_size: int | Literal["auto"] = "auto"
    layout: LayoutName | Literal["auto"] = "auto"
    kv_order: KVOrder | Literal["auto"] = "auto"
    block_tokens: int | None = None
    guard_rows: int = 0
    guard: drivers.Guard = "zero"
    overlap: bool = True
    deferred_reclamation: bool = True
    eager_pages: int = 1
    zero_on_free: bool = False
    watermark: float = 0.1

    def __post_init__(self) -> None:
        self._check_int("max_batch_size", at_least=1, at_most=MOST_SLOTS)
        self._check_int("max_context_len", at_least=1, at_most=MOST_TOKENS)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        if self.groups is not None:
            try:  # a tensor without dimensions says that it is iterable
                groups = None if isinstance(self.groups, str) else tuple(self.groups)
            except TypeError:
                groups = None
            if groups is None:
                raise ConfigError(f"groups={self.groups!r} must be a list of one or more vattn.TensorGroup")
            object.__setattr__(self, "groups", groups)
        _ = self.tensor_groups
        if self.block_tokens is not None:
            self._check_int("block_tokens", at_least=1, at_most=MOST_TOKENS)
        for name in ("guard_rows", "eager_pages"):
            self._check_int(name, at_least=0, at_most=MOST_TOKENS)
        check_choice("layout", self.layout, ("auto", *LAYOUTS))
        check_choice("kv_order", self.kv_order, ("auto", "NHD", "HND"))
        check_choice("guard", self.guard, ("zero", "strict"))
        for name in ("overlap", "deferred_reclamation", "zero_on_free"):
            check_choice(name, getattr(self, name), (True, False))
        watermark = as_real(self.watermark)
        if watermark is None or not 0 <= watermark < 1:
            raise ConfigError(f"watermark={shown(self.watermark)} must be a share of the budget: 0 <= watermark < 1")
        object.__setattr__(self, "watermark", watermark)
        if not is_auto(self.memory_utilization):
            share = as_real(self.memory_utilization)
            if share is None or not 0 < share <= 1:
                raise ConfigError(
                    f"memory_utilization={shown(self.memory_utilization)} must be a share of the free memory: "
                    "0 < memory_utilization <= 1"
                )
            object.__setattr__(self, "memory_utilization", share)
            if not is_auto(self.memory_budget):
                raise ConfigError(
                    f"memory_utilization={share} is for memory_budget='auto', which is {self.memory_budget!r}; give one"
                )
        if not is_auto(self.page_size):
            self._check_int("page_size", at_least=1, at_most=2**40)
            if drivers.parse(self.device).type == "cpu":
                drivers.find(self.device).check_page_size(int(self.page_size))
        drivers.parse(self.device)
        if self.block_tokens is not None and self.layout != "auto" and self.page_size != "auto":
            raise ConfigError(
                f"block_tokens={self.block_tokens} follows from layout={self.layout!r} and page_size={self.page_size}; "
                "give at most two of the three"
            )

    @classmethod
    def from_options(cls, **options: Any) -> KVConfig:
        """A config from keywords, with a ConfigError instead of a TypeError for unknown or missing ones."""
        cls.check_names(options)
        return cls(**options)

    @classmethod
    def check_names(cls, names: Collection[str]) -> None:
        """Raises ConfigError for names that are not options, or if a required one is missing."""
        cls.check_options(names)
        missing = [name for name in ("max_batch_size", "max_context_len") if name not in names]
        if missing:
            raise ConfigError(f"{', '.join(missing)} must be given")

    @classmethod
    def check_options(cls, names: Collection[str], settled: Collection[str] = (), why: str = "") -> None:
        """Raises ConfigError for names that are not options, or are among those that something else settles: `why`
        says what.
        """
        if taken := sorted(set(settled).intersection(names)):
            raise ConfigError(f"{', '.join(taken)}: {why}; leave out")
        known = [field.name for field in fields(cls) if field.name not in settled]
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"unknown option {', '.join(unknown)}; possible are {', '.join(known)}")

    @property
    def tensor_groups(self) -> tuple[TensorGroup, ...]:
        """The tensor groups, with their element types; one group if all layers are alike."""
        if self.groups is None:
            missing = [name for name in (*OF_ONE_GROUP[:3], "dtype") if getattr(self, name) is None]
            if missing:
                raise ConfigError(f"{', '.join(missing)} must be given, or groups=[vattn.TensorGroup(...), ...]")
            self._check_int("num_layers", at_least=1, at_most=MOST_LAYERS)
            assert self.num_layers is not None
            assert self.num_kv_heads is not None
            assert self.head_dim is not None
            groups: Sequence[TensorGroup] = [
                TensorGroup(
                    layers=range(self.num_layers),
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    v_head_dim=self.v_head_dim,
                    sliding_window=self.sliding_window,
                )
            ]
        else:
            groups = self.groups
            given = [name for name in OF_ONE_GROUP if getattr(self, name) is not None]
            if given:
                raise ConfigError(f"{', '.join(given)} and groups contradict each other; let the groups say it")
            if not groups or not all(isinstance(group, TensorGroup) for group in groups):
                raise ConfigError(f"groups={groups!r} must be a list of one or more vattn.TensorGroup")
            layers = [layer for group in groups for layer in group.indices]
            if len(set(layers)) < len(layers):
                twice = sorted({layer for layer in layers if layers.count(layer) > 1})
                raise ConfigError(f"layers {twice} are in several groups, or twice in one; a layer is in one group")
            if self.dtype is None and any(group.dtype is None for group in groups):
                raise ConfigError("dtype must be given, to the cache or to each of its groups")
        return tuple(group if group.dtype is not None else replace(group, dtype=self.dtype) for group in groups)

    def _check_int(self, name: str, *, at_least: int, at_most: int) -> None:
        object.__setattr__(self, name, check_int(name, getattr(self, name), at_least=at_least, at_most=at_most))


def default_kv_order(device: str | torch.device) -> KVOrder:
    """The order that `kv_order="auto"` selects on `device`."""
    return _AUTO_KV_ORDER[drivers.parse(device).type]


def build_layout(config: KVConfig, name: LayoutName, page_size: int) -> Layout:
    """The geometry of `config` in layout `name` with pages of `page_size` bytes."""
    return build(
        name,
        default_kv_order(config.device) if config.kv_order == "auto" else config.kv_order,
        groups=config.tensor_groups,
        slots=config.max_batch_size,
        tokens=config.max_context_len + config.guard_rows,
        page_size=page_size,
        window_guard=_WINDOW_GUARD[drivers.parse(config.device).type],
    )


def candidates(config: KVConfig, page_sizes: Sequence[int]) -> Iterator[Layout]:
    """The layouts that a config leaves open, the best first, with pages of these sizes in bytes, ascending.

    On the host the order is that of the layouts, from the fastest to read to the finest. On CUDA short blocks come
    first, and then pages that cover enough tokens.
    """
    kind = drivers.parse(config.device).type
    names = _AUTO_LAYOUTS[kind] if config.layout == "auto" else (config.layout,)
    layouts = (build_layout(config, name, size) for name in names for size in page_sizes)
    if kind == "cpu":
        return layouts

    def rank(layout: Layout) -> tuple[int, ...]:
        block_tokens = layout.bands[0].block_tokens  # common to all bands
        enough = next(i for i, tokens in enumerate(_CUDA_PAGE_TOKENS) if layout.page_tokens >= tokens)
        return max(block_tokens, _CUDA_BLOCK_TOKENS), enough, names.index(layout.name), block_tokens, layout.page_size

    return iter(sorted(layouts, key=rank))


def most_waste_share(device: str | torch.device) -> float:
    """The share of its budget that an automatic layout may leave unused on `device` when all slots run."""
    return _MOST_WASTE[drivers.parse(device).type]


def budget_bytes(
    memory_budget: int | str, device: str | torch.device, memory_utilization: float | Literal["auto"] = "auto"
) -> int:
    """The bytes of a `KVConfig.memory_budget`; "auto" is measured now.

    Raises:
        ConfigError: the budget is not a size, or the device has no driver.
        DriverError: CUDA cannot use the device.
    """
    if not is_auto(memory_budget):
        return parse_bytes(memory_budget, "memory_budget")
    found = drivers.find(device)
    share = found.default_utilization if memory_utilization == "auto" else memory_utilization
    return int(found.available_memory() * share)


def resolve(
    config: KVConfig,
    *,
    pool_page_size: int | None = None,
    pool_budget: int | None = None,
    most_waste: int | None = None,
) -> tuple[Layout, int]:
    """Resolves the options that are "auto".

    Args:
        pool_page_size: page size of a given pool, which the cache has to use.
        pool_budget: bytes of a given pool, to which an automatic budget resolves, and which has to do for a first step.
        most_waste: bytes that requests may leave unused in an automatic layout when all slots run, where that is less
            than a share of the budget.

    Returns:
        The layout, and the budget of the config in pages, of which a given pool may have fewer.

    Raises:
        ConfigError: no choice fits (the message says what would), or the device has no driver here.
        DriverError: CUDA cannot use the device.
    """
    device = drivers.find(config.device)
    if pool_budget is not None and config.memory_budget == "auto":
        if not is_auto(config.memory_utilization):
            raise ConfigError(
                f"memory_utilization={config.memory_utilization} is a share of free memory, but this cache has that "
                "of a pool; leave it out, or give a memory_budget as this cache's bound"
            )
        budget = pool_budget
    else:
        budget = budget_bytes(config.memory_budget, config.device, config.memory_utilization)
    if pool_page_size is not None:
        if config.page_size not in ("auto", pool_page_size):
            raise ConfigError(
                f"page_size={config.page_size} contradicts the pool's pages of {pool_page_size} bytes; leave it out"
            )
        sizes = [pool_page_size]
    elif config.page_size != "auto":
        sizes = [device.check_page_size(config.page_size)]
    else:
        sizes = list(device.page_sizes)

    cheap = len(sizes) > 1 and device.torch_device.type == "cpu"
    # On the host lazily, as building a layout is the slowest part and one of the first usually fits.
    layouts: Iterable[Layout] = candidates(config, sizes)
    if config.block_tokens is not None:
        names = LAYOUTS if config.layout == "auto" else (config.layout,)
        every = [build_layout(config, name, size) for name in names for size in sizes]
        fine = [c for c in every if c.page_tokens <= config.block_tokens]
        if not fine:
            best = min(every, key=lambda c: c.page_tokens)
            raise ConfigError(
                f"block_tokens={config.block_tokens} is not possible: the finest here is {best.page_tokens} tokens "
                f"(layout={best.name!r}, page_size={best.page_size})"
            )
        coarsest = max(c.page_tokens for c in fine)
        layouts = [c for c in fine if c.page_tokens == coarsest]
        cheap = False
    share = most_waste_share(config.device)
    chosen = choose(layouts, budget, device.mapping_limit(), cheap=cheap, share=share, most_waste=most_waste)
    if chosen.reserved_bytes > MOST_ADDRESSES:
        raise ConfigError(
            f"{chosen.slots} slots of {config.max_context_len} tokens need {format_bytes(chosen.reserved_bytes)} of "
            f"addresses, and a process has {format_bytes(MOST_ADDRESSES)}; lower max_batch_size or max_context_len"
        )
    most = budget if pool_budget is None else min(budget, pool_budget)
    first = chosen.pages(1 + config.guard_rows)
    if chosen.budget_pages(most) < first:
        whose = "the pool's budget" if most == pool_budget else f"memory_budget={config.memory_budget!r}"
        guard = f" and {config.guard_rows} guard rows" if config.guard_rows else ""
        fixed = config.layout != "auto" or config.page_size != "auto"
        finer = ", or choose smaller pages or a finer layout ('sliced', 'fused')" if fixed else ""
        raise ConfigError(
            f"{whose} ({format_bytes(most)}) is below one token block: layout {chosen.name!r} with pages of "
            f"{format_bytes(chosen.page_size)} needs {first} pages ({format_bytes(first * chosen.page_size)}) for a "
            f"slot's first token{guard}; give or free more memory{finer}"
        )
    return chosen, chosen.budget_pages(budget)


def choose(
    candidates: Iterable[Layout],
    budget: int,
    mapping_limit: int | None,
    *,
    cheap: bool,
    share: float,
    most_waste: int | None = None,
) -> Layout:
    """The best layout: the first one that is cheap to map and wastes little, or else the one that wastes least.

    Args:
        candidates: the best first.
        budget: bytes.
        mapping_limit: mappings that the process may have; None without such a limit.
        cheap: whether pages have to be cheap to map, which the host's are by their size.
        share: of the budget, that requests may leave unused when all slots run.
        most_waste: as for `resolve`.
    """

    def mappings(candidate: Layout) -> int:
        return candidate.mappings(candidate.budget_pages(budget))

    def waste(candidate: Layout) -> int:
        return candidate.usual_waste * candidate.slots

    def may_waste(candidate: Layout) -> float:
        longest = candidate.slots * candidate.tokens * candidate.bytes_per_token
        most = share * min(candidate.budget_pages(budget) * candidate.page_size, longest)
        return most if most_waste is None else min(most, most_waste)

    tried = []
    for candidate in candidates:
        fits = mapping_limit is None or mappings(candidate) <= mapping_limit // 2
        maps_cheaply = not cheap or (
            candidate.page_tokens >= _MIN_PAGE_TOKENS
            and candidate.bytes_per_token <= _MOST_TOKEN_PAGES * candidate.page_size
        )
        if fits and maps_cheaply and waste(candidate) <= may_waste(candidate):
            return candidate
        tried.append((not fits, 0 if fits else mappings(candidate), waste(candidate), candidate))
    return min(tried, key=lambda each: each[:3])[3]
