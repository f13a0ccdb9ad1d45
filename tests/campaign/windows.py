"""`BlockWindows`, on a pool with other block windows and with caches: blocks that several rows share and that are
written while they are shown, memory that comes and goes, failures, interrupts, children and odd arguments.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import vattn
from tests.campaign import blocks, contents
from tests.campaign.driver_faults import fail_each
from tests.campaign.fuzz import NAMES, argument, evaluated
from tests.campaign.interrupts import interrupt_one
from tests.campaign.lifetimes import WINDOWS_LOOKS, Child, Close, Drop, Forget, Keep, Look, Make
from tests.campaign.operations import Operation
from tests.campaign.play import Played, play
from tests.campaign.scenarios import SELDOM, Drawer, draw_config
from tests.campaign.world import Call, Config, Found, Refused, WindowsUnderTest, World


@dataclass(frozen=True)
class OnBlocks(Operation):
    """An operation on block windows, by their number."""

    def moved(self, by: int) -> Operation:
        return self

    def _of(
        self, world: World, code: str, expected: tuple[type[BaseException], ...] = (), into: str = ""
    ) -> Call | None:
        """A call on them; None if they were dropped. Those that were closed say so."""
        each = world.windows[self.cache]
        if each.windows is None:
            return None
        made = Call(f"{each.name}.{code}", expected=expected)
        return made if each.open else replace(made, expected=(vattn.CacheClosed,), refused=True)


@dataclass(frozen=True)
class Back(OnBlocks):
    """`back`."""

    blocks: tuple[int, ...]

    def call(self, world: World) -> Call | None:
        each = world.windows[self.cache]
        if not each.open:
            return self._of(world, f"back({list(self.blocks)})")
        new = {block for block in self.blocks if block not in each.model.contents}
        pages = len(new) * world.look(each.it.stats).block_bytes // world.config.page_size
        # Free pages are enough; what caches have parked may be.
        expected = (vattn.OutOfPages,) if pages > world.pool.free_pages and not world.config.own else ()
        return self._of(world, f"back({list(self.blocks)})", expected)

    def accept(self, world: World, value: Any) -> None:
        model = world.windows[self.cache].model
        new = len(set(self.blocks) - set(model.contents))
        if value is not None and value != new:
            raise Found("back miscounts", f"{value} instead of {new}")
        model.back(self.blocks)

    def settle(self, world: World) -> bool:
        each = world.windows[self.cache]
        if each.open and each.it.backed() != set(each.model.contents):
            self.accept(world, None)
        return True

    def simpler(self) -> Iterator[Operation]:
        for block in self.blocks:
            yield replace(self, blocks=tuple(other for other in self.blocks if other != block))


@dataclass(frozen=True)
class Write(OnBlocks):
    """Tokens of a block are written at home, whoever shows it."""

    block: int
    start: int
    end: int

    def perform(self, world: World) -> None:
        each = world.windows[self.cache]
        if not each.open or self.block not in each.model.contents:
            return
        world.stamp += 1
        made = blocks.numbers(world.stamp, self.start, self.end)
        world.lines.append(
            f"write({each.name}, {self.block}, {self.start}, {self.end}, np.array({made.tolist()}, np.uint64))"
        )
        for layer, home in enumerate(each.homes):
            if not contents.writable(home[:, :, None], self.block, self.start, self.end):
                raise Found("a block that is backed cannot be written", f"{each.name}, block {self.block}")
            home[self.block, self.start : self.end] = blocks.expected(made, layer, home.shape[2])[0]
        each.model.contents[self.block][self.start : self.end] = made


@dataclass(frozen=True)
class Show(OnBlocks):
    """`show`: of lists or a table, in windows of the caller's or of the library's choice."""

    rows: tuple[tuple[int, ...], ...]
    windows: tuple[int, ...] | None = None
    table: bool = False

    def call(self, world: World) -> Call | None:
        each = world.windows[self.cache]
        given = "" if self.windows is None else f", windows={list(self.windows)}"
        if self.table and self.rows:
            most = max(map(len, self.rows))
            padded = [[*row, *[each.model.num_blocks + 7] * (most - len(row))] for row in self.rows]
            shape = f"torch.tensor({padded}, dtype=torch.int32).reshape({len(padded)}, {most})"
            shown = f"{shape}, {[len(row) for row in self.rows]}"
        else:
            shown = str([list(row) for row in self.rows])
        expected: list[type[BaseException]] = []
        if len(self.rows) > each.model.num_windows:
            expected += [vattn.NoFreeSlot, vattn.InvalidSlot]
        if any(len(row) > each.model.most_blocks for row in self.rows):
            expected.append(vattn.InvalidLength)
        if any(block not in each.model.contents for row in self.rows for block in row):
            expected.append(vattn.InvalidBlock)
        return self._of(world, f"show({shown}{given})", tuple(expected))

    def accept(self, world: World, value: Any) -> None:
        each = world.windows[self.cache]
        if len(set(value)) != len(self.rows) or not all(0 <= window < each.model.num_windows for window in value):
            raise Found("show returned windows that cannot be", f"{value} for {len(self.rows)} rows")
        if self.windows is not None and value != list(self.windows):
            raise Found("show takes other windows than those it was given", f"{value} instead of {self.windows}")
        each.model.rows = [(window, list(row)) for window, row in zip(value, self.rows, strict=True)]
        self._look(world, each)

    @staticmethod
    def _look(world: World, each: WindowsUnderTest) -> None:
        """What rows see at once, without a wait for anything."""
        for window, row in each.model.rows:
            held = np.concatenate([each.model.contents[block] for block in row] or [np.zeros(0, np.uint64)])
            for layer, array in enumerate(each.shown):
                made, known = blocks.expected(held, layer, array.shape[2])
                if (array[window, : len(held)] != made)[known].any():
                    raise Found("wrong rows in a window", f"{each.name}, layer {layer}, window {window}: {row}")

    def settle(self, world: World) -> bool:
        world.windows[self.cache].model.rows = []  # until the next one no row is promised to be shown
        return True

    def simpler(self) -> Iterator[Operation]:
        for i in range(len(self.rows)):
            left = None if self.windows is None else self.windows[:i] + self.windows[i + 1 :]
            yield replace(self, rows=self.rows[:i] + self.rows[i + 1 :], windows=left)
            if self.rows[i]:
                yield replace(self, rows=(*self.rows[:i], self.rows[i][:-1], *self.rows[i + 1 :]))
        if self.table:
            yield replace(self, table=False)
        if self.windows is not None:
            yield replace(self, windows=None)


@dataclass(frozen=True)
class Trim(OnBlocks):
    """`trim`."""

    keep: tuple[int, ...]

    def call(self, world: World) -> Call | None:
        return self._of(world, f"trim({list(self.keep)})")

    def accept(self, world: World, value: Any) -> None:
        each = world.windows[self.cache]
        gone = len(set(each.model.contents) - set(self.keep))
        if value is not None and value < gone * world.look(each.it.stats).block_bytes:
            raise Found("trim gives back less than blocks had", f"{value} bytes for {gone} blocks")
        each.model.trim(self.keep)

    def settle(self, world: World) -> bool:
        each = world.windows[self.cache]
        if each.open and each.it.backed() != set(each.model.contents):
            self.accept(world, None)
        return True

    def simpler(self) -> Iterator[Operation]:
        for block in self.keep:
            yield replace(self, keep=tuple(other for other in self.keep if other != block))


@dataclass(frozen=True)
class OddCall(OnBlocks):
    """A call with an argument of an odd kind: refused, or taken for what `operator.index` says.

    Attributes:
        code: the call, with "@" where the argument is.
        argument: it.
        inner: the operation that it stands for, if it stands for one.
        errors: may come besides vattn's own.
        harmless: it may be accepted, whatever it means.
    """

    code: str
    argument: str
    inner: Operation | None = None
    errors: tuple[type[Exception], ...] = ()
    harmless: bool = False

    def perform(self, world: World) -> None:
        each = world.windows[self.cache]
        if not each.open:
            return
        if self.inner is not None and self.inner.call(world) is None:
            return
        world.names.update(NAMES)
        code = f"{each.name}.{self.code.replace('@', self.argument)}"
        made = Call(code, expected=(vattn.VattnError, *self.errors))
        try:
            value = world.call(made)
        except Refused:
            return
        world.counts["odd arguments accepted"] += 1
        if self.inner is not None:
            self.inner.accept(world, value)
        elif not self.harmless:
            kind = type(evaluated(self.argument)).__name__
            raise Found(f"BlockWindows.{made.name} accepts {kind}", f"{code} returned {value!r}")

    def simpler(self) -> Iterator[Operation]:
        if self.inner is None and self.argument != "0.5":
            yield replace(self, argument="0.5")


# Of options of the constructor: arguments that cannot be.
_ODD_OPTIONS = {
    "num_layers": ("0", "1.5", "True", "2**70", "None"),
    "num_blocks": ("0", "-1", "2**31", "2**64", "'8'", "4.0"),
    "block_size": ("0", "0.5", "2**40", "None"),
    "row": ("()", "5", "(2, 0)", "(2, 1.5)", "'32'", "[1] * 40", "None"),
    "dtype": ("'float32'", "torch.quint8", "None", "float"),
    "num_windows": ("0", "2**31", "2**70", "np.float32(3)", "False"),
    "max_context_len": ("0", "2**60", "'64'"),
    "layout": ("'sliced'", "None", "['fused']", "np.array([1, 2])"),
    "guard": ("'strikt'", "None", "True"),
    "memory_budget": ("0", "-5", "'lots'", "1.5", "True"),
    "page_size": ("3000", "'x'", "0", "4096.0", "None"),
    "pool": ("5", "'pool'", "torch"),
    "device": ("'tpu'", "None", "5.5"),
}


@dataclass(frozen=True)
class OddMake(OnBlocks):
    """A constructor with an option that cannot be."""

    option: str
    argument: str

    def call(self, world: World) -> Call | None:
        options = {name: repr(value) for name, value in world.windows[self.cache].options.items()}
        given = {**options, "pool": "None", self.option: self.argument}
        code = f"vattn.BlockWindows({', '.join(f'{name}={value}' for name, value in given.items())})"
        return Call(code, expected=(vattn.ConfigError,), refused=True)


class BlockDrawer:
    """Draws operations on block windows, and on the caches beside them."""

    def __init__(self, rng: random.Random, *, odd: float = 0.0) -> None:
        self.rng = rng
        self._odd = odd
        self._caches = Drawer(rng)
        self._recent: dict[int, list[list[int]]] = {}  # by number: rows of a batch that goes on

    def operations(self, world: World, count: int) -> Iterator[Operation]:
        for _ in range(count):
            yield self.draw(world)

    def draw(self, world: World) -> Operation:
        rng = self.rng
        if world.caches and rng.random() < 0.25:
            return self._caches.draw(world)
        number = rng.randrange(len(world.windows))
        each = world.windows[number]
        if not each.open and rng.random() < 0.6:
            return Make(number, blocks=True)
        if each.open and rng.random() < self._odd:
            return self._odd_call(number, each)
        drawn: tuple[tuple[int, Callable[[int, WindowsUnderTest], Operation]], ...] = (
            (6, self._back),
            (8, self._write),
            (12, self._show),
            (3, self._trim),
            (1, self._life),
        )
        ((_, draw),) = rng.choices(drawn, [weight for weight, _ in drawn])
        return draw(number, each)

    def leaving(self, world: World) -> Iterator[Operation]:
        """All of them, one after another."""
        for number in range(len(world.windows)):
            yield self.rng.choice((Close, Drop))(number, blocks=True)

    def target(self, world: World) -> tuple[list[Operation], Operation]:
        """An operation that is a call, to be interrupted, and those that it needs before it."""
        rng = self.rng
        if world.config.own and rng.random() < 0.4:  # the pool ends in the same call
            return [], Close(rng.randrange(len(world.windows)), blocks=True)
        if rng.random() < 0.5:
            number = rng.randrange(len(world.windows))
            if not world.windows[number].open:
                return [], Make(number, blocks=True)
            if rng.random() < 0.3:
                return [Close(number, blocks=True)], Make(number, blocks=True)
            looks = (rng.choice(WINDOWS_LOOKS), "check()", "check()")
            return [], rng.choice(
                (Close(number, blocks=True), *(Look(number, blocks=True, what=what) for what in looks))
            )
        while True:
            operation = self.draw(world)
            if type(operation).perform is Operation.perform and operation.call(world) is not None:
                return [], operation

    # Operations

    def _back(self, number: int, each: WindowsUnderTest) -> Operation:
        rng = self.rng
        count = rng.choice((1, 1, 2, 4, each.model.num_blocks))
        return Back(number, tuple(self._any(each) for _ in range(count)))

    def _write(self, number: int, each: WindowsUnderTest) -> Operation:
        rng, size = self.rng, each.model.block_size
        block = rng.choice(sorted(each.model.contents) or [0])
        start = rng.choice((0, 0, rng.randrange(size)))
        return Write(number, block, start, rng.choice((size, rng.randint(start + 1, size))))

    def _trim(self, number: int, each: WindowsUnderTest) -> Operation:
        share = self.rng.choice((0.0, 0.5, 0.8, 1.0))
        return Trim(number, tuple(block for block in sorted(each.model.contents) if self.rng.random() < share))

    def _show(self, number: int, each: WindowsUnderTest) -> Operation:
        """Rows that go on from those before: longer, shorter, in another order, gone, new, with blocks in common."""
        rng, model = self.rng, each.model
        backed = sorted(model.contents)

        def some(count: int) -> list[int]:
            return [rng.choice(backed) for _ in range(count)] if backed else []

        rows = [row.copy() for row in self._recent.get(number, [])]
        if rng.random() < 0.95:
            rows = [[block for block in row if block in model.contents] for row in rows]
        for row in rows:
            change = rng.random()
            if change < 0.4:
                row += some(rng.choice((1, 1, 2)))
            elif change < 0.5:
                del row[rng.randint(0, len(row)) :]
            elif change < 0.6 and row and backed:
                row[rng.randrange(len(row))] = rng.choice(backed)
            del row[model.most_blocks :]
        if rng.random() < 0.3:
            rng.shuffle(rows)
        if rows and rng.random() < 0.3:
            del rows[rng.randrange(len(rows))]
        while len(rows) < model.num_windows and rng.random() < 0.5:
            start = rng.choice(rows)[: rng.randint(0, 3)] if rows and rng.random() < 0.5 else []
            rows.append([*start, *some(rng.randint(0, model.most_blocks))][: model.most_blocks])
        self._recent[number] = [row.copy() for row in rows]
        if rng.random() < 0.03:  # what is refused
            rows.append(rng.choice(([model.num_blocks - 1] * (model.most_blocks + 1), [self._any(each)])))
        windows = None
        if rng.random() < 0.2 and len(rows) <= model.num_windows:
            windows = tuple(rng.sample(range(model.num_windows), len(rows)))
        return Show(number, tuple(map(tuple, rows)), windows, rng.random() < 0.4)

    def _life(self, number: int, each: WindowsUnderTest) -> Operation:
        rng = self.rng
        if rng.random() < 0.05:
            return Child(number, blocks=True)
        return rng.choice(
            (
                Close(number, blocks=True),
                Drop(number, blocks=True),
                Keep(number, blocks=True, how="layer"),
                Keep(number, blocks=True, how="lend"),
                Forget(number, blocks=True, which=rng.randrange(4)),
                Look(number, blocks=True, what=rng.choice(WINDOWS_LOOKS)),
            )
        )

    def _odd_call(self, number: int, each: WindowsUnderTest) -> Operation:
        rng, model = self.rng, each.model
        if rng.random() < 0.25:
            option = rng.choice(sorted(_ODD_OPTIONS))
            return OddMake(number, option, rng.choice(_ODD_OPTIONS[option]))
        which = rng.choice(("back", "trim", "row", "rows", "counts", "table", "windows", "shown", "home", "window"))
        backed = rng.choice(sorted(model.contents) or [0])
        code, meaning = argument(rng, backed)
        inner: Operation | None = None
        harmless, errors = False, ()
        if which == "back":
            if meaning is not None and 0 <= meaning < model.num_blocks:
                inner = Back(number, (meaning,))
            return OddCall(number, "back([@])", code, inner)
        if which == "trim":
            keep = tuple(model.contents)
            inner = Trim(number, (*keep, meaning)) if meaning is not None and 0 <= meaning < model.num_blocks else None
            return OddCall(number, f"trim([*{list(keep)}, @])", code, inner)
        if which == "row":
            inner = Show(number, ((meaning,),)) if meaning in model.contents else None
            return OddCall(number, rng.choice(("show([[@]])", "show(((@,),))")), code, inner)
        if which == "rows":
            # What has no blocks shows nothing, whatever it is.
            return OddCall(number, "show(@)", code, harmless=_nothing(code))
        if which == "counts":
            code, meaning = argument(rng, rng.randint(0, 2))
            inner = Show(number, ((backed, backed)[:meaning],)) if meaning in (0, 1, 2) else None
            if backed not in model.contents:
                inner = inner if meaning == 0 else None
            return OddCall(number, f"show(torch.tensor([[{backed}, {backed}]], dtype=torch.int32), [@])", code, inner)
        if which == "table":
            return OddCall(
                number,
                f"show(torch.tensor([[{backed}]], dtype=torch.int32), @)",
                code,
                self._table(number, code, backed),
            )
        if which == "windows":
            code, meaning = argument(rng, rng.randrange(model.num_windows))
            if meaning is not None and 0 <= meaning < model.num_windows and backed in model.contents:
                inner = Show(number, ((backed,),), (meaning,))
            return OddCall(number, f"show([[{backed}]], windows=[@])", code, inner)
        if which == "shown":
            code, meaning = argument(rng, rng.randrange(model.num_windows))
            harmless = meaning is not None and 0 <= meaning < model.num_windows
        else:
            code, meaning = argument(rng, rng.randrange(model.layers))
            harmless, errors = meaning is not None and 0 <= meaning < model.layers, (IndexError,)
        return OddCall(number, f"{which}(@)", code, None, errors, harmless)

    def _table(self, number: int, code: str, backed: int) -> Operation | None:
        """What counts for a table of one row of one block mean."""
        try:
            counts = [int(each) for each in evaluated(code)]
        except Exception:
            return None
        plain = str(getattr(evaluated(code), "dtype", "int")).rpartition(".")[2]
        if len(counts) != 1 or not plain.startswith(("int", "uint")) or counts[0] not in (0, 1):
            return None
        return Show(number, ((backed,)[: counts[0]],))

    def _any(self, each: WindowsUnderTest) -> int:
        return self.rng.randrange(each.model.num_blocks)


def _nothing(code: str) -> bool:
    """Whether an argument is an empty sequence."""
    with contextlib.suppress(Exception):
        value = evaluated(code)
        return not isinstance(value, (str, bytes, dict, torch.Tensor)) and len(value) == 0
    return False


def draw_windows(rng: random.Random, *, table: bool = False) -> Config:
    """A configuration with block windows, and mostly with caches on the same pool."""
    config = replace(draw_config(rng, table=table), books=rng.random() < 0.05)
    if rng.random() < 0.3:
        config = replace(config, caches=())
    page = config.page_size
    made, pages = [], config.pool_pages if config.caches else 0
    for _ in range(rng.choice((1, 1, 2))):
        options, needed = _draw_options(rng, page)
        made.append(options)
        pages += max(1, int(needed * rng.choice((0.4, 0.8, 1.2))))
    return replace(config, windows=tuple(made), pool_pages=pages)


def _draw_options(rng: random.Random, page: int) -> tuple[dict[str, Any], int]:
    """Options of block windows with whole pages in every block, and the pages of all of them."""
    layers = rng.choice((1, 1, 2, 3))
    layout = rng.choice(("layered", "fused"))
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.int8, torch.float64))
    tensors = 1 if layout == "fused" else layers
    together = layers if layout == "fused" else 1
    for _ in range(200):
        block_size = rng.choice((8, 16, 32, 48, 64)) if page < 65536 else rng.choice((64, 128, 256))
        row = rng.choice(((2, 1, 32), (2, 2, 64), (64,), (3, 16), (256,), (2, 8, 128)))
        size = block_size * int(np.prod(row)) * dtype.itemsize * together
        if size % page == 0 and size // page <= 8:
            break
        row = (page // (block_size * dtype.itemsize * together),)
        if row[0] and row[0] * block_size * dtype.itemsize * together == page:
            size = page
            break
    else:  # for example, three layers of one byte side by side never fill pages of 2 MiB
        return _draw_options(rng, page)
    most = rng.choice((1, 3, 5, 8))
    blocks = rng.choice((2, 5, 9, 14))
    options = {
        "num_layers": layers,
        "num_blocks": blocks,
        "block_size": block_size,
        "row": row,
        "dtype": dtype,
        "num_windows": rng.choice((1, 2, 3, 5)),
        "max_context_len": most * block_size - rng.choice((0, 0, 1)),
        "layout": layout,
    }
    return options, blocks * tensors * size // page


def scenario(rng: random.Random, *, operations: int = 100) -> Played:
    """Operations; or a few of them with each driver call failing; or with one interrupted everywhere; or with odd
    arguments.
    """
    (kind,) = rng.choices(("plain", "odd", "failing", "interrupted"), (60, 20, 3, 6))
    if kind == "failing":
        return fail_each(rng, draw_windows(rng, table=True), BlockDrawer(rng), operations=12, points=40)
    config = draw_windows(rng)
    if kind == "interrupted":
        config = replace(config, own=rng.random() < 0.4, every=rng.choice((1, 1, SELDOM)), books=False)
        return interrupt_one(rng, config, BlockDrawer(rng), points=40)
    drawer = BlockDrawer(rng, odd=0.5 if kind == "odd" else 0.0)
    return play(config, lambda world: drawer.operations(world, operations))
