"""`vattn.attention`: `decode` and the adapters that run on a CPU, against attention in float64.

Memory is laid out once, where nothing is mapped but what may be read, and attended many times. Each call is drawn from
the seed of its memory and a number of its own, so that it can be made again alone: `again`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vattn
from tests.campaign.attention_arguments import odd_call
from tests.campaign.play import Played, journal
from tests.support.cpu_kernels import KERNELS, asking_for
from vattn.attention import AttentionParams, Blocks, Case, Contiguous, PackedBatch, Span, decode, get

PAGE = 4096
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 2.0**-24  # of a rounding to float32, relative
ROUNDING = {torch.float32: UNIT, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-125, torch.bfloat16: 2.0**-125, torch.float16: 2.0**-24}
ROWS = 48  # of queries

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Guarded:
    """Address space in which a read or a write ends the process, but where it was backed."""

    def __init__(self) -> None:
        self._reserved: list[tuple[int, int]] = []

    def reserve(self, size: int) -> int:
        """Whole pages, one more at each end; the address after the first."""
        size = -(-size // PAGE) * PAGE + 2 * PAGE
        address = _libc.mmap(None, size, 0, 0x4022, -1, 0)
        assert address not in (None, ctypes.c_void_p(-1).value), "no address space is left"
        self._reserved.append((address, size))
        return address + PAGE

    def back(self, address: int, size: int) -> None:
        """Memory that is NaN in every type of floats."""
        assert not _libc.mprotect(address, size, 3)
        ctypes.memset(address, 0xFF, size)

    def close(self) -> None:
        for address, size in self._reserved:
            _libc.munmap(address, size)

    def flat(self, size: int, dtype: torch.dtype) -> Tensor:
        """Backed memory, of which the last element ends where nothing is mapped."""
        size = -(-size * dtype.itemsize // PAGE) * PAGE
        address = self.reserve(size)
        self.back(address, size)
        return over(address, size, dtype)

    def laid_out(self, rng: random.Random, used: Any, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """`[slots, tokens, heads, dim]` in some order, with some strides; the tokens that are `used` are backed."""
        sizes, strides, extent = [*used.shape, heads], [0, 0, 0], dim
        # Each of these may become a mapping, of which a process has 65,530.
        apart = rng.random() < 0.4 and np.count_nonzero(used) * heads < 4000
        order = rng.choice(([0, 1, 2], [0, 2, 1], [0, 1, 2], [0, 2, 1], [2, 0, 1], [2, 1, 0], [1, 0, 2], [1, 2, 0]))
        for i in reversed(order):
            if rng.random() < 0.04:
                continue  # expanded
            stride = extent + rng.choice((0, 0, 0, 1, 8, 3))
            if apart and i != 1 and sizes[i] <= 64:  # a page between two of them
                per_page = PAGE // dtype.itemsize
                stride = (-(-stride // per_page) + 1) * per_page
            strides[i] = stride
            extent += (sizes[i] - 1) * stride
        slots, tokens = np.nonzero(used)
        begin = slots[:, None] * strides[0] + tokens[:, None] * strides[1] + np.arange(heads) * strides[2]
        begin = begin.reshape(-1) * dtype.itemsize
        end = begin + dim * dtype.itemsize
        place = rng.random()
        if place < 0.7:  # the last byte of what is used ends a page
            shift = -int(end.max()) % PAGE
        else:
            shift = -int(begin.min()) % PAGE if place < 0.85 else rng.randrange(PAGE // dtype.itemsize) * dtype.itemsize
        size = shift + extent * dtype.itemsize
        address = self.reserve(size)
        pages = np.zeros(-(-size // PAGE) + 1, np.int64)
        np.add.at(pages, (begin + shift) // PAGE, 1)
        np.add.at(pages, (end + shift - 1) // PAGE + 1, -1)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], np.cumsum(pages) > 0, [0]))))
        for low, high in edges.reshape(-1, 2).tolist():
            self.back(address + low * PAGE, (high - low) * PAGE)
        return over(address, size, dtype).as_strided((*sizes, dim), (*strides, 1), shift // dtype.itemsize)


def over(address: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def put(tensor: Tensor, data: Tensor) -> None:
    """Writes to memory of which some is the same."""
    for i in range(tensor.ndim - 1):
        if tensor.stride(i) == 0:
            tensor, data = tensor.narrow(i, 0, 1), data.narrow(i, 0, 1)
    tensor.copy_(data)


def exact(tensor: Tensor) -> Any:
    """As numbers of float64."""
    return tensor.detach().double().numpy()


@dataclass
class Stored:
    """Keys and values of layers, and what they are in float64.

    Attributes:
        room: the tokens of each slot that may be read.
        keys, values: per slot `[kv_heads, room, dim]`.
        value_scales: per slot `[kv_heads, room]`, of codes.
        sure: sums of their products with queries are exact in float32.
        marks: lengths of interest: around what is not finite.
    """

    key: Tensor
    value: Tensor
    scales: tuple[Tensor, Tensor] | None
    table: Tensor | None
    room: list[int]
    keys: list[Any]
    values: list[Any]
    value_scales: list[Any] | None
    sure: bool
    marks: list[int]

    def __post_init__(self) -> None:
        self.norms = [np.sqrt(np.einsum("hnd,hnd->hn", keys, keys)) for keys in self.keys]
        self.bad = [~np.isfinite(values) for values in self.values]
        self.values = [np.where(bad, 0, values) for bad, values in zip(self.bad, self.values, strict=True)]
        self.most = [np.abs(values).max(-1) for values in self.values]
        self.wild = any(bool(bad.any()) for bad in self.bad)


@dataclass(frozen=True)
class Shape:
    """Element types and sizes."""

    dtype: torch.dtype
    codes: bool
    heads: int
    kv_heads: int
    dim: int
    v_dim: int

    @classmethod
    def drawn(cls, rng: random.Random) -> Shape:
        kv_heads = rng.choice((1, 1, 2, 2, 3, 4))
        group = rng.choice((1, 1, 2, 3, 4, 7, 8, 9) if kv_heads < 3 else (1, 2, 3))
        dim = rng.choice((8, 16, 16, 24, 32, 40, 64, 72, 128, 200))
        v_dim = dim if rng.random() < 0.5 else rng.choice((8, 16, 24, 48, 64, 72, 128))
        return cls(rng.choice(FLOATS), rng.random() < 0.3, kv_heads * group, kv_heads, dim, v_dim)


@dataclass(frozen=True)
class Bound:
    """What a kernel may round.

    Attributes:
        pairs: weights are bfloat16. quads: queries and weights are integers of 16 bits.
        score: relative, of scores; if any, products of elements are rounded too, so no sum of them is exact.
        weight: relative, of weights; and no less than `least`, of each.
        largest: scores beyond are no longer numbers.
    """

    pairs: bool = False
    quads: bool = False
    score: float = 0.0
    weight: float = 0.0
    least: float = 0.0
    largest: float = 1e37


@dataclass(frozen=True)
class Attended:
    """A call.

    Attributes:
        requests: the slot, the length and the new tokens of each.
        sinks: which of the drawn; -1 for none.
        query: which of the drawn, and its first row.
    """

    requests: list[tuple[int, int, int]]
    query: tuple[int, int]
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    sinks: int = -1
    out: str = "new"
    check: str = ""

    @property
    def rows(self) -> int:
        return sum(new for _, _, new in self.requests)


class World:
    """Memory that is attended many times."""

    plain = False  # neither codes nor rows that are not finite

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.rng = rng = random.Random(f"attention/{seed}")
        self.shape = shape = Shape.drawn(rng)
        if self.plain:
            self.shape = shape = replace(shape, codes=False)
        self.memory = Guarded()
        self.owner: Any = contextlib.nullcontext()
        self.style = rng.choice(("normal", "normal", "normal", "scaled", "sure", "sure", "low", "equal", "outliers"))
        self.power = rng.randrange(-3, 4) if shape.dtype == torch.float16 else rng.randrange(-8, 17)
        self.random = np.random.default_rng(seed)
        self.kernel = rng.choice(KERNELS)
        self.threads = rng.choice((1,) * 38 + (2, 3))
        self.stored: Stored = getattr(self, f"_{kind}")()
        shape = self.shape
        count, area = rng.randint(1, 3), ROWS * shape.heads
        self.queries = []
        for _ in range(count):
            made = self.memory.laid_out(rng, np.ones((1, ROWS), bool), shape.heads, shape.dim, shape.dtype)
            put(made, self._numbers((1, ROWS, shape.heads, shape.dim), query=True))
            if rng.random() < 0.04 and not self.plain:  # torch's fused kernel gives 0 for such a query
                made[0, rng.randrange(ROWS), rng.randrange(shape.heads), rng.randrange(shape.dim)] = math.nan
            self.queries.append((made[0], exact(made[0])))
        self.sinks = [self._sinks() for _ in range(2)]
        self.numbers = [self.memory.flat(16, torch.int32) for _ in range(3)]
        self.out = self.memory.flat(area * shape.v_dim + 64, shape.dtype)
        self.scratch = self.memory.flat(area * shape.dim + 64, shape.dtype)
        self.bound = Bound(
            pairs=self.kernel in ("amx_bf16", "avx512_bf16") and shape.dtype == torch.bfloat16 and not shape.codes,
            quads=self.kernel in ("amx_bf16", "avx512_bf16", "avx512_vnni") and shape.codes,
        )
        self.calls = 0

    def __enter__(self) -> World:
        self._kernels = asking_for(self.kernel)
        self._kernels.__enter__()
        torch.set_num_threads(self.threads)
        return self

    def __exit__(self, *raised: object) -> None:
        torch.set_num_threads(1)
        self._kernels.__exit__(None, None, None)
        self.owner.__exit__(None, None, None)
        self.memory.close()

    # What is stored.

    def _numbers(self, shape: tuple[int, ...], query: bool = False, dim: int = -1) -> Tensor:
        """Elements of queries or of keys."""
        draw, power = self.random, 2.0**self.power
        if self.style in ("sure", "low"):
            # Scores of some multiples of a power of two; or all far below 0, as near as float32 tells them apart.
            low = -1 if self.style == "sure" else 1 if query else -1
            made = draw.integers(low, 2 if self.style == "sure" or query else 0, shape) * power
            if self.style == "low" and not query:
                made[draw.random(shape) < 0.1] = 0
        else:
            made = draw.standard_normal(shape)
            if self.style == "scaled":
                made *= 10.0 ** draw.integers(-3, 2)
            elif self.style == "equal" and not query:
                made[...] = made[:1, :1]
            elif self.style == "outliers":
                made[draw.random(shape) < 0.02] *= 30
        return torch.from_numpy(made.astype(np.float32))

    def _values(self, shape: tuple[int, ...]) -> Tensor:
        made = self.random.standard_normal(shape)
        if self.rng.random() < 0.2:
            made *= 10.0 ** self.rng.randrange(-4, 4 if self.shape.dtype == torch.float16 else 25)
        return torch.from_numpy(made.astype(np.float32))

    def _fill(self, slots: list[tuple[Any, ...]], key: Tensor, value: Tensor, scales: Any) -> None:
        """Writes rows at places; a few are not finite."""
        for place in slots:
            shape = tuple(key[place].shape[:2])
            if scales is None:
                put(key[place], self._numbers((*shape, self.shape.kv_heads, self.shape.dim)))
                put(value[place], self._values((*shape, self.shape.kv_heads, self.shape.v_dim)))
                continue
            for codes, scale in ((key, scales[0]), (value, scales[1])):
                drawn = self.random.integers(-127, 128, tuple(codes[place].shape), np.int8)
                put(codes[place], torch.from_numpy(drawn))
                sizes = np.abs(self.random.standard_normal(tuple(scale[place].shape))) / 127 + 1e-6
                put(scale[place], torch.from_numpy(sizes.astype(np.float32)))

    def _wild(self, row: Any, key: Tensor, value: Tensor, scales: Any) -> None:
        """Makes a row of keys, values or scales something that is not finite."""
        rng = self.rng
        odd = rng.choice((math.nan, math.inf, -math.inf))
        head = rng.randrange(self.shape.kv_heads)
        if scales is not None:
            rng.choice(scales)[(*row, head)] = rng.choice((odd, -1.0))
        else:
            side = rng.choice((key, value))
            side[(*row, head, rng.randrange(side.shape[-1]))] = odd

    def _guarded(self) -> Stored:
        """Contiguous slots, or blocks, in memory that ends where it is used."""
        rng, shape = self.rng, self.shape
        slots = rng.randint(1, 5)
        longest = rng.choice((1, 2, 17, 64, 128, 130, 256, 300))
        if rng.random() < 0.03 and shape.dim * shape.kv_heads <= 128:
            longest = rng.choice((1100, 2049, 5000))
        paged = rng.random() < 0.35
        room = [rng.choice((longest, longest, rng.randint(1, longest))) for _ in range(slots)]
        sizes = {"dtype": torch.int8 if shape.codes else shape.dtype}
        table = None
        if paged:
            block = rng.choice((1, 2, 8, 16, 24, 100, 256))
            if longest > 300:
                block = max(block, 16)
            per_slot = [-(-tokens // block) for tokens in room]
            room = [blocks * block for blocks in per_slot]
            number = rng.randint(max(per_slot), sum(per_slot) + 3)  # fewer than all: slots share some
            rows = [rng.sample(range(number), blocks) for blocks in per_slot]
            wide = max(per_slot) + rng.randrange(3)
            table = self._table(rows, wide)
            used = np.zeros((number, block), bool)
            used[sorted({each for row in rows for each in row})] = True
        else:
            used = np.arange(longest + rng.choice((0, 0, 1, 50))) < np.array(room)[:, None]
        key = self.memory.laid_out(rng, used, shape.kv_heads, shape.dim, **sizes)
        value = self.memory.laid_out(rng, used, shape.kv_heads, shape.v_dim, **sizes)
        scales = None
        if shape.codes:
            of = rng.choice((torch.float32, torch.bfloat16))
            scales = tuple(self.memory.laid_out(rng, used, shape.kv_heads, 1, of) for _ in range(2))
        places = [(slice(i, i + 1), slice(0, int(row.sum()))) for i, row in enumerate(used) if row.any()]
        self._fill(places, key, value, scales)
        marks = []
        for _ in range(0 if self.plain else rng.choice((0, 0, 0, 0, 1, 3))):
            slot = rng.randrange(slots)
            token = rng.randrange(room[slot])
            marks += [token, token + 1]
            if table is None:
                self._wild((slot, token), key, value, scales)
            else:
                self._wild((int(table[slot, token // block]), token % block), key, value, scales)
        return self._read(key, value, scales, table, room, marks)

    def _table(self, rows: list[list[int]], wide: int) -> Tensor:
        """A block table that is anything behind the blocks of a row."""
        used = np.ones((1, len(rows)), bool)
        table = self.memory.laid_out(self.rng, used, 1, wide, torch.int32)[0, :, 0]
        if table.stride(0) < wide:  # expanded: all rows are one
            table = self.memory.flat(len(rows) * wide, torch.int32)[-len(rows) * wide :].view(len(rows), wide)
        for i, row in enumerate(rows):
            table[i] = self.rng.choice((-1, 0, 2**31 - 1))
            table[i, : len(row)] = torch.tensor(row)
        return table

    def _read(
        self, key: Tensor, value: Tensor, scales: Any, table: Tensor | None, room: list[int], marks: list[int]
    ) -> Stored:
        """What lies there, as float64."""
        block = key.shape[1]

        def rows(tensor: Tensor, slot: int) -> Any:
            if table is None:
                found = tensor[slot, : room[slot]]
            else:
                found = tensor[table[slot, : room[slot] // block].long()].flatten(0, 1)
            return exact(found).transpose(1, 0, 2)

        keys, values, of_values = [], [], []
        for slot in range(len(room)):
            sides = [rows(key, slot), rows(value, slot)]
            if scales is not None:
                for i, scale in enumerate(scales):
                    factor = rows(scale, slot)
                    factor = np.where(np.isfinite(factor) & (factor >= 0), factor, math.nan)
                    sides[i] = sides[i] * factor
                of_values.append(np.nan_to_num(factor[:, :, 0]))
            keys.append(np.ascontiguousarray(sides[0]))
            values.append(np.ascontiguousarray(sides[1]))
        sure = self.style in ("sure", "low") and scales is None
        return Stored(key, value, scales, table, room, keys, values, of_values or None, sure, marks)

    def _cache(self) -> Stored:
        """A layer of a `KVCache` of which slots end with their last page."""
        rng = self.rng
        self.shape = shape = replace(self.shape, codes=False)
        config = vattn.KVConfig(
            num_layers=2,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            v_head_dim=shape.v_dim,
            dtype=shape.dtype,
            max_batch_size=3,
            max_context_len=600,
            page_size=PAGE,
            kv_order=rng.choice(("HND", "NHD")),
            layout=rng.choice(("layer", "sliced", "fused")),
            guard="strict",
            eager_pages=0,
            overlap=False,
            memory_budget="64MiB",
        )
        self.owner = cache = vattn.KVCache(config)
        slots = [cache.alloc_reqid() for _ in range(3)]
        page = max(1, cache.layout.page_tokens)  # of rows that are longer than a page
        room = [min(600, rng.choice((page, 2 * page, page + 1, rng.randint(1, 300)))) for _ in slots]
        cache.step(dict(zip(slots, room, strict=True)))
        key, value = cache.layer(rng.randrange(2))
        places = [(slice(slot, slot + 1), slice(0, tokens)) for slot, tokens in zip(slots, room, strict=True)]
        self._fill(places, key, value, None)
        return self._read(key, value, None, None, [room[slots.index(i)] for i in range(3)], [])

    def _windows(self) -> Stored:
        """Windows of `BlockWindows`, which share blocks."""
        rng = self.rng
        self.shape = shape = replace(self.shape, codes=False, v_dim=self.shape.dim)
        size = 2 * shape.kv_heads * shape.dim * shape.dtype.itemsize
        block = math.lcm(size, PAGE) // size
        self.owner = windows = vattn.BlockWindows(
            num_layers=2,
            num_blocks=6,
            block_size=block,
            row=(2, shape.kv_heads, shape.dim),
            dtype=shape.dtype,
            num_windows=3,
            max_context_len=4 * block,
            page_size=PAGE,
            guard="strict",
        )
        windows.back(range(6))
        layer = rng.randrange(2)
        home = windows.home(layer)
        key, value = home[:, :, 0], home[:, :, 1]
        self._fill([(slice(0, 6), slice(0, block))], key, value, None)
        rows = [rng.sample(range(6), rng.randint(1, 4)) for _ in range(3)]
        windows.show(rows, windows=[0, 1, 2])
        shown = windows.window(layer)
        return self._read(shown[:, :, 0], shown[:, :, 1], None, None, [len(row) * block for row in rows], [])

    def _sinks(self) -> tuple[Tensor, Any]:
        rng, heads = self.rng, self.shape.heads
        made = self.memory.flat(heads, rng.choice(FLOATS))[-heads:]
        odd = (-math.inf, -math.inf, math.nan, math.inf, 1e4, -1e4, 1e38, -1e38)
        for head in range(heads):
            made[head] = rng.gauss(0, 3) if rng.random() < 0.7 else rng.choice(odd)
        return made, exact(made)

    # What is asked.

    def drawn(self, number: int) -> Attended:
        """The call of that number."""
        rng, stored = random.Random(f"{self.seed}/{number}"), self.stored
        requests = []
        left = ROWS
        for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 0)) if rng.random() < 0.5 else rng.choice((1, 2))):
            slot = rng.randrange(len(stored.room))
            room = stored.room[slot]
            length = rng.choice((room, room, 1, rng.randint(1, room), rng.randint(1, room), 127, 128, 129, 256, 257))
            if stored.marks and rng.random() < 0.6:
                length = rng.choice(stored.marks)
            length = max(1, min(length, room))
            new = 1
            if rng.random() < 0.25:
                new = min(length, 30 if rng.random() < 0.06 else rng.choice((2, 2, 3, 4, 5, 7, 9)))
            if room > 300:
                new = min(new, 3)
            if new > left:
                break
            left -= new
            requests.append((slot, length, new))
        rows = sum(new for _, _, new in requests)
        return Attended(
            requests,
            (rng.randrange(len(self.queries)), rng.choice((0, ROWS - rows, ROWS - rows))),
            _scale(rng),
            _softcap(rng),
            rng.choice((None, None, None, 1, 2, rng.randint(1, 300), 128, 129, 2**31 - 1, 2**31, 2**80)),
            rng.choice((-1, -1, -1, 0, 1)),
            rng.choice(("new", "new", "new", "given", "given", "query")),
            rng.choices(("", "threads", "alone", "behind"), (90, 2, 5, 5))[0],
        )

    def play(self, number: int) -> str | None:
        """Makes the call of that number; what is wrong, or None."""
        call = self.drawn(number)
        query, plain = self.queries[call.query[0]]
        first, last = call.query[1], call.query[1] + call.rows
        query, plain = query[first:last], plain[first:last]
        options, found = self.options(call)
        given: Tensor | None = None
        before = self.out[:0]
        if call.out == "query" and self.shape.dim == self.shape.v_dim:
            before, given = self._end(self.scratch, (call.rows, self.shape.heads, self.shape.dim))
            query = given.copy_(query)
        elif call.out != "new":
            before, given = self._end(self.out, (call.rows, self.shape.heads, self.shape.v_dim))
            given.fill_(math.nan)
        before.fill_(7)
        got = self._decode(query, options, given)
        if not bool((before == 7).all()):
            return "memory before out was written"
        if given is not None and got is not given:
            return "out is not what was given"
        if wrong := self.judged(call, plain, got):
            return wrong
        if call.check and call.requests:
            return self._checked(call, options, self.queries[call.query[0]][0][first:last], got, found)
        return None

    @staticmethod
    def _end(area: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """What lies before the end of an area, and the end, behind which nothing is mapped."""
        begin = len(area) - math.prod(shape)
        return area[begin - 32 : begin], area[begin:].view(shape)

    def options(self, call: Attended) -> tuple[dict[str, Any], list[list[int]]]:
        """Arguments of `decode` but the query."""
        stored = self.stored
        starts = [0, *itertools.accumulate(new for _, _, new in call.requests)]
        lists = [[slot for slot, _, _ in call.requests], [length for _, length, _ in call.requests], starts]
        slots, lengths, begins = (self._ints(area, values) for area, values in zip(self.numbers, lists, strict=True))
        options: dict[str, Any] = {"key": stored.key, "value": stored.value, "lengths": lengths, "slots": slots}
        if lists[0] == list(range(len(lists[0]))) and len(lists[0]) % 2:
            del options["slots"]
        if call.rows != len(call.requests) or call.query[0]:
            options["starts"] = begins
        if stored.table is not None:
            options["block_table"] = stored.table
        if stored.scales is not None:
            options["scales"] = stored.scales
        for name in ("scale", "softcap", "window"):
            if (value := getattr(call, name)) is not None:
                options[name] = value
        if call.sinks >= 0:
            options["sinks"] = self.sinks[call.sinks][0]
        return options, lists

    @staticmethod
    def _ints(area: Tensor, values: list[int]) -> Tensor:
        part = area[len(area) - len(values) :]
        if values:
            part.numpy()[:] = values
        return part

    def _decode(self, query: Tensor, options: dict[str, Any], out: Tensor | None = None) -> Tensor:
        self.calls += 1
        return decode(query, **options, out=out) if out is not None else decode(query, **options)

    def _checked(
        self, call: Attended, options: dict[str, Any], query: Tensor, got: Tensor, lists: list[list[int]]
    ) -> str | None:
        """The same call otherwise gives the same, to the last bit."""
        got = got.clone()
        if call.check == "threads":
            torch.set_num_threads(self.threads % 3 + 1)
            try:
                again = self._decode(query, options)
            finally:
                torch.set_num_threads(self.threads)
            return None if same(again, got) else "another number of threads changes the result"
        if call.check == "alone":
            i = random.Random(call.rows).randrange(len(call.requests))
            low, high = lists[2][i], lists[2][i + 1]
            options |= {
                "slots": torch.tensor(lists[0][i : i + 1], dtype=torch.int32),
                "lengths": torch.tensor(lists[1][i : i + 1], dtype=torch.int32),
                "starts": torch.tensor([0, high - low], dtype=torch.int32),
            }
            again = self._decode(query[low:high], options)
            return None if same(again, got[low:high]) else "the neighbours of a request change its result"
        stored, slot = self.stored, call.requests[0][0]
        sides = (stored.key, stored.value, *(stored.scales or ()))
        alone = stored.table is None and not any(side.stride(i) == 0 for side in sides for i in range(2))
        if self.kind != "guarded" or not alone:
            return None
        longest = max(length for other, length, _ in call.requests if other == slot)
        behind = [side[slot, longest : stored.room[slot]] for side in sides]
        kept = [each.clone() for each in behind]
        for each in behind:
            put(each, torch.full(each.shape, 5 if each.dtype == torch.int8 else math.inf))
        again = self._decode(query, options)
        for each, before in zip(behind, kept, strict=True):
            put(each, before)
        return None if same(again, got) else "what lies behind a length changes the result"

    # What is right.

    def judged(self, call: Attended, query: Any, got: Tensor) -> str | None:
        """What is wrong with a result; None if nothing is."""
        shape = self.shape
        if got.shape != (call.rows, shape.heads, shape.v_dim) or got.dtype != shape.dtype:
            return f"the result is {list(got.shape)} {got.dtype}"
        result, row = exact(got), 0
        sinks = None if call.sinks < 0 else self.sinks[call.sinks][1]
        for slot, length, new in call.requests:
            with np.errstate(all="ignore"):
                wrong = self._compared(call, query[row : row + new], slot, length, sinks, result[row : row + new])
            if wrong:
                return wrong
            row += new
        return None

    def _compared(self, call: Attended, query: Any, slot: int, length: int, sinks: Any, got: Any) -> str | None:
        shape, stored, bound = self.shape, self.stored, self.bound
        new, group = len(query), shape.heads // shape.kv_heads
        rounding = ROUNDING[shape.dtype]
        window = length if call.window is None else min(call.window, length)
        first = max(0, length - new - window + 1)
        keys, values, norms, most, bad = (
            each[slot][:, first:length] for each in (stored.keys, stored.values, stored.norms, stored.most, stored.bad)
        )
        scale = shape.dim**-0.5 if call.scale is None else float(call.scale)

        def rows(x: Any) -> Any:  # [new, heads, n] to [kv_heads, new * group, n]
            x = x.reshape(new, shape.kv_heads, group, -1).transpose(1, 0, 2, 3)
            return x.reshape(shape.kv_heads, new * group, -1)

        queries = rows(query)
        size = np.sqrt(np.einsum("hrd,hrd->hr", queries, queries))[:, :, None] * norms[:, None]
        scores = queries @ keys.transpose(0, 2, 1) * scale
        # How far scores may be off.
        rough = 3 * UNIT + bound.score
        off = abs(scale) * shape.dim * 2.0**-126
        if not stored.sure or bound.score:
            off = off + size * (abs(scale) * UNIT * (min(shape.dim, 4 * math.sqrt(shape.dim)) + 4))
        elif math.frexp(scale)[0] in (0.5, -0.5) or (scale > 1e-6 and call.softcap is None):
            rough = 0.0
        off = off + 2.0**-149 * size
        if bound.quads:
            largest = np.abs(queries).max(-1)[:, :, None] / 65024 + 1e-30
            off = off + largest * norms[:, None] * (abs(scale) * math.sqrt(shape.dim) * 1.01)
        free = np.maximum(size, size * abs(scale)) > bound.largest
        free &= np.isfinite(size)
        off = np.where(np.isfinite(off), off, 0)  # beside infinite keys there is nothing to round
        if call.softcap is not None:
            cap = float(call.softcap)
            scores = cap * np.tanh(scores / cap)
            rough += 1e-6 + 2 * bound.score
            off = off + cap * 2.0**-149
        if rough:
            off = off + rough * np.abs(scores)
        seen = None
        if new > 1:
            position, place = np.arange(length - new, length)[:, None], np.arange(first, length)
            seen = (place <= position) & (place > position - window)
            seen = np.repeat(seen, group, 0)
            scores = np.where(seen, scores, -math.inf)
            free = free & seen
        highest = scores.max(-1, keepdims=True)
        if sinks is not None:
            sinks = rows(np.broadcast_to(sinks[:, None], (new, shape.heads, 1)))
            highest = np.maximum(highest, sinks)
        below = scores - highest
        weights = np.exp(below)
        off = np.where(np.isfinite(below), off + 4 * UNIT * np.abs(below) + 1e-6 + 5e-7 * min(8, length / 128), 0)
        more = np.exp(np.minimum(below + off, 50)) - weights
        total, least = weights.sum(-1, keepdims=True), np.exp(below - off).sum(-1, keepdims=True)
        if sinks is not None:
            sink = np.exp(sinks - highest)
            slack = np.where(np.isfinite(sinks), (3 * UNIT + bound.score) * np.abs(sinks) + 1e-6, 0)
            total, least = total + sink, least + np.exp(sinks - highest - slack)
            extra = np.exp(np.minimum(sinks - highest + slack, 50)) - sink
        want = weights @ values / total
        reach = np.abs(want).max(-1, keepdims=True)
        column = most[:, :, None]
        spread = (more @ column + more.sum(-1, keepdims=True) * reach) / least
        if sinks is not None:
            spread += extra * reach / least
        spread = np.where(np.isnan(spread), math.inf, spread)
        mean = weights @ column / total
        hull = column.max(1, keepdims=True) + reach
        if bound.quads:
            assert stored.value_scales is not None
            shares = weights * stored.value_scales[slot][:, None, first:length]
            step = shares.max(-1, keepdims=True) / 131070 * 1.01 + 1e-30
            spread += np.minimum(shares, step).sum(-1, keepdims=True) * 127 / total
        seen_at_most = length - first
        steps = 4 * math.sqrt(min(seen_at_most, 128)) + seen_at_most / 128 + 12
        loss = UNIT * steps + bound.weight + (2.0**-8 if bound.pairs else 0)
        allowed = (
            np.minimum(spread, hull)
            + mean * loss
            + hull * (2.0**-100 + bound.least * seen_at_most)
            + SMALLEST[shape.dtype]
        )
        allowed = allowed + rounding * (np.abs(want) + allowed)
        got = rows(got)
        fine = np.abs(got - want) <= allowed
        broken = ~np.isfinite(got)
        fine |= broken & (np.isnan(want) | (np.abs(want) + allowed > (65500 if shape.dtype == torch.float16 else 3e38)))
        fine |= free.any(-1, keepdims=True)
        if stored.wild and bad.any():
            seen_all = np.ones((new * group, length - first)) if seen is None else seen.astype(float)
            touched = seen_all @ bad > 0.5
            fine = np.where(touched, broken, fine)
            if seen is not None:  # kernels may multiply what a query does not see by 0
                fine |= bad.any(1, keepdims=True) & ~touched
        if fine.all():
            return None
        head, line, column_ = (int(each[0]) for each in np.nonzero(~fine))
        error = float(np.abs(got - want)[~fine].max())
        return (
            f"{int((~fine).sum())} of {fine.size} elements are wrong: KV head {head}, row {line}, element {column_} is "
            f"{got[head, line, column_]}, not {want[head, line, column_]} +- "
            f"{np.broadcast_to(allowed, want.shape)[head, line, column_]}; off by {error} at most; slot {slot}, length "
            f"{length}, {new} new, {self}, {call}"
        )

    def __str__(self) -> str:
        key = self.stored.key
        return (
            f"{self.kind} {self.style} {self.shape}, kernels {self.kernel}, {self.threads} threads, key "
            f"{list(key.shape)} {list(key.stride())}, room {self.stored.room}"
        )


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(one.nan_to_num(nan=77), other.nan_to_num(nan=77))


def _scale(rng: random.Random) -> float | None:
    if rng.random() < 0.5:
        return None
    odd = (0, 0.0, 1, 1.0, -0.25, -1, 0.25, 2.0**-20, 1e-6, 1e-7, 1e-40, 30.0, 1e30, -1e30, 3e38, np.float32(0.1))
    return rng.choice((rng.uniform(0, 1), rng.uniform(-0.5, 0.5), rng.choice(odd), rng.choice(odd)))


def _softcap(rng: random.Random) -> float | None:
    if rng.random() < 0.6:
        return None
    return rng.choice((10 ** rng.uniform(-3, 6), 10 ** rng.uniform(-3, 6), 30, 50.0, 1e-30, 1e20, 3.4e38))


class Adapters(World):
    """The same as packed batches, through `Native` and `TorchSDPA`."""

    plain = True

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        shape = self.shape
        name = self.rng.choice(("native", "torch_sdpa"))
        self.adapter = get(name, Case(dtype=shape.dtype, head_dim=shape.dim, v_head_dim=shape.v_dim))
        self.whole = self.rng.random() < 0.8
        if name != "native":
            rounding = 2 * ROUNDING[shape.dtype]
            self.bound = Bound(
                score=2 * rounding,
                weight=rounding,
                least=SMALLEST[shape.dtype],
                largest=3e4 if shape.dtype == torch.float16 else 1e37,
            )

    def stored_rows(self, slot: int, length: int, start: int) -> tuple[Tensor, Tensor]:
        stored = self.stored
        sides = []
        for side in (stored.key, stored.value):
            if stored.table is None:
                rows = side[slot, start:length]
            else:
                blocks = stored.table[slot, : -(-length // side.shape[1])].long()
                rows = side[blocks].flatten(0, 1)[start:length]
            sides.append(rows.transpose(0, 1)[None])
        return sides[0], sides[1]

    def play(self, number: int) -> str | None:
        call = self.drawn(number)
        if not call.requests:
            return None
        if abs(call.scale or 0) > 1e3:  # torch's fused kernel has no such numbers
            call = replace(call, scale=None)
        query, plain = self.queries[call.query[0]]
        first, last = call.query[1], call.query[1] + call.rows
        sinks = None if call.sinks < 0 else self.sinks[call.sinks][0]
        batch = PackedBatch(tuple(Span(slot, length - new, length) for slot, length, new in call.requests))
        window = None if call.window is None else min(call.window, 2**31 - 1)
        params = AttentionParams(call.scale, window, call.softcap, sinks)
        self.calls += 1
        got = self.adapter(query[first:last], Source(self), 0, batch, params)
        wrong = self.judged(call, plain[first:last], got)
        return None if wrong is None else f"{self.adapter.name}: {wrong}"


class Source:
    """What an adapter reads."""

    def __init__(self, world: Adapters) -> None:
        self._world = world

    def stored(self, layer: int) -> Contiguous | Blocks | None:
        stored = self._world.stored
        if not self._world.whole:
            return None
        if stored.table is not None:
            return Blocks(stored.key, stored.value, stored.table)
        return Contiguous(stored.key, stored.value)

    def read(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        return self._world.stored_rows(slot, length, start)


WORLDS: dict[str, tuple[type[World], str]] = {
    "guarded": (World, "guarded"),
    "cache": (World, "cache"),
    "windows": (World, "windows"),
    "adapters": (Adapters, "guarded"),
}


def again(name: str, seed: int, number: int) -> str:
    """Makes one call of a scenario again; what is wrong with it."""
    if name == "odd":
        return str(odd_call(seed, number)[1])
    made, kind = WORLDS[name]
    with made(kind, seed) as world:
        return f"{world}, {world.drawn(number)}: {world.play(number)}"


def scenario(rng: random.Random, *, calls: int = 60) -> Played:
    """So many calls over one memory, or as many with odd arguments."""
    name = rng.choices(("guarded", "cache", "windows", "adapters", "odd"), (72, 6, 4, 7, 11))[0]
    seed = rng.randrange(1 << 30)
    played = Played(lines=["from tests.campaign.attention import again"])

    def call(number: int, play: Callable[[int], str | None]) -> bool:
        played.lines[1:] = [f"print(again({name!r}, {seed}, {number}))"]
        journal(played.lines)
        try:
            wrong = play(number)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            played.kind, played.detail = f"{name}: {_kind(wrong)}", wrong
        return wrong is None

    if name == "odd":
        for number in range(calls):
            what = ""

            def odd(number: int) -> str | None:
                nonlocal what
                what, wrong = odd_call(seed, number)
                return wrong

            played.calls += 1
            fine = call(number, odd)
            played.counts[f"odd: {what}"] += 1
            if not fine:
                break
        return played
    made, kind = WORLDS[name]
    with made(kind, seed) as world:
        for number in range(calls):
            if not call(number, world.play):
                break
        played.calls = world.calls
    played.counts[f"{name}: calls"] += played.calls
    if isinstance(world, Adapters):
        played.counts[f"{world.adapter.name}: calls"] += played.calls
    else:
        played.counts[f"{world.kernel}: calls"] += played.calls
    return played


def _kind(wrong: str) -> str:
    """Without numbers and what follows."""
    head = wrong.split(":")[0] if ":" in wrong else wrong
    return " ".join("n" if any(c.isdigit() for c in word) else word for word in head.split()[:9])
