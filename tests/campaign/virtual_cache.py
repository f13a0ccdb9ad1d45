"""Mode `virtual_cache`: random calls on `VirtualCache`s, and writes to what they hand out, against plain tensors.

Caches draw on a pool of the world's with a `KVCache` beside them, on pools of their own, or on the process's. They are
closed, dropped, copied and made anew, and tensors that were taken from them stay. Driver calls fail, calls are
interrupted, and the process forks. In the end /proc says that nothing is left.
"""

from __future__ import annotations

import ast
import gc
import inspect
import os
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import vattn
from tests.campaign import books
from tests.campaign.injection import events, interrupted
from tests.campaign.plain import Plain, same
from tests.campaign.play import Played, journal
from tests.campaign.world import Found, Stopped, left, usage
from tests.support.faults import FaultyTable

_PAGE = 4096
_MOST_ROWS = 8
# Calls that are interrupted, and those that follow them, by how often.
_TORN = {"crop": 12, "update": 6, "move": 2, "assign": 1, "write": 1, "trim": 1, "reset": 1}
_TORN_CODED = _TORN | {"assign": 16}  # codes and scales are written one after the other
_MEETING = {"move": 5, "duplicate": 3, "crop": 1, "update": 1, "trim": 1}


def new(seed: int, rows: int, heads: int, tokens: int, dims: Sequence[tuple[int, int]], dtype: torch.dtype) -> Any:
    """K and V of new tokens for every layer."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(rows, heads, tokens, dim, generator=generator).to(dtype) for dim in pair] for pair in dims]


def forked(caches: Sequence[Any]) -> str:
    """What calls in a forked child do other than to raise ForkedProcess; empty if nothing."""
    import copy
    import pickle
    import signal

    import vattn

    def first_that_does_not() -> str:
        signal.alarm(20)
        for number, cache in enumerate(caches):
            layer = cache.layers[0]
            calls: dict[str, Callable[[], object]] = {
                "keys": lambda layer=layer: layer.keys.sum(),
                "values": lambda layer=layer: layer.values.tolist(),
                "assignment": lambda layer=layer: setattr(layer, "keys", layer.__dict__),
                "copy": lambda cache=cache: copy.copy(cache),
                "deepcopy": lambda cache=cache: copy.deepcopy(cache),
                "pickle": lambda cache=cache: pickle.dumps(cache),
                "iteration": lambda cache=cache: list(cache),
                "update": lambda cache=cache: cache.update(*[torch.zeros(1, 1, 1, 16)] * 2, 0),
                "crop": lambda cache=cache: cache.crop(-1),
                "reset": lambda cache=cache: cache.reset(),
                "reorder": lambda cache=cache: cache.reorder_cache(torch.tensor([0])),
                "repeat": lambda cache=cache: cache.batch_repeat_interleave(2),
                "select": lambda cache=cache: cache.batch_select_indices(torch.tensor([0])),
                "stats": lambda cache=cache: cache.stats(),
                "check": lambda cache=cache: cache.check(),
                "trim": lambda cache=cache: cache.trim(),
                "close": lambda cache=cache: cache.close(),
            }
            for name, call in calls.items():
                try:
                    call()
                except (vattn.ForkedProcess, vattn.CacheClosed):
                    continue
                except BaseException as error:
                    return f"{name} of cache {number} raises {type(error).__name__}"
                return f"{name} of cache {number} succeeds"
            cache.get_seq_length()
            repr(cache)
        return ""

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, first_that_does_not().encode() or b"-")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    _, status = os.waitpid(pid, 0)
    return found.removeprefix("-") if found else f"a call ends with signal {os.WTERMSIG(status)}"


@dataclass
class Under:
    """A cache under test.

    Attributes:
        limit: its `max_context_len`.
        most: its `max_batch_size`.
        ample: whether its budget holds whatever is drawn.
        pooled: whether it draws on the world's pool.
        several: whether layers with windows differ in shape, so that some may have gone on where others failed to.
    """

    plain: Plain
    heads: int
    limit: int
    most: int | None
    ample: bool
    pooled: bool
    several: bool
    closed: bool = False


@dataclass
class Kept:
    """A tensor that was taken from a cache.

    Attributes:
        cache: the cache whose memory it shows; None if that has moved on, or the tensor is a copy.
        left: what lies in that memory since the cache has moved on, with what else was taken from there.
        copied: what a copy holds.
        first: the first token that it shows.
        row: the only row that it shows; None for all.
    """

    cache: str | None
    layer: int
    side: int
    first: int
    end: int
    row: int | None
    left: Plain | None = None
    copied: Tensor | None = None

    def part(self, plain: Plain) -> Tensor:
        """What it shows of a cache."""
        assert plain.held is not None
        rows = plain.held[self.layer][self.side][:, :, self.first : self.end]
        return rows if self.row is None else rows[self.row]


@dataclass
class World:
    """Caches, what was taken from them, and the script of what was done."""

    rng: random.Random
    names: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    caches: dict[str, Under] = field(default_factory=dict)
    kept: dict[str, Kept] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)  # what updates returned
    number: int = 0
    armed: bool = False
    bystander: int = 0  # its length
    focus: str = ""  # the cache of the last operation
    lost: tuple[str, int] | None = None  # the cache that the last operation lost the rows of, and how many
    failing: bool = False  # a driver call of the next call fails, if it can be made to
    tearing: bool = False  # the next call is interrupted, if it can be
    staying: bool = False  # operations keep to one cache
    places: Counter[tuple[str, str]] = field(default_factory=Counter)  # for an interrupt in a call, as far as is known
    place: tuple[str, str] = ("", "")  # of the last call that was torn: the call, and the kind of event

    # The script

    def line(self, code: str) -> None:
        self.lines.append(code)
        journal(self.lines)

    def run(self, code: str) -> None:
        """Makes a statement that has to succeed."""
        self.line(code)
        exec(code, self.names)

    def calm(self) -> None:
        """No driver call fails from here on."""
        if self.faulty:
            self.run("table.heal()")

    def next(self, letter: str) -> str:
        self.number += 1
        return f"{letter}{self.number}"

    # Making worlds

    def begin(self) -> None:
        rng = self.rng
        self.lines += [
            "import copy, gc, os, pickle\nfrom collections.abc import Callable, Sequence\nfrom typing import Any",
            "import numpy as np, torch\nfrom transformers import LlamaConfig, MistralConfig\nimport vattn",
            inspect.getsource(new),
            inspect.getsource(forked),
        ]
        exec("\n".join(self.lines[:2]), self.names)
        self.names |= {"new": new, "forked": forked, "interrupted": interrupted}
        self.guard = rng.choice(("zero", "strict", "strict"))
        self.tight = rng.random() < 0.5
        self.faulty = self.pooled = False
        if rng.random() < 0.6:
            self.pooled = True
            self.faulty = rng.random() < 0.5
            self.zeroing = rng.random() < 0.15
            table = ""
            if self.faulty:
                self.names["FaultyTable"] = FaultyTable
                self.run("table = FaultyTable()")
                # Destructors call it, where an error may be on its way, with which no Python code can run.
                self.run(
                    "from tests.support import target\n"
                    "table.addresses['cuMemAddressFree'] = target.table()['cuMemAddressFree']"
                )
                table = ", table=table.addresses"
            pages = rng.choice((60, 150, 300)) if self.tight else 6000
            self.run(
                f"pool = vattn.PagePool({pages} * {_PAGE}, page_size={_PAGE}, guard={self.guard!r}, "
                f"zero_on_free={self.zeroing}{table})"
            )
            if self.faulty and rng.random() < 0.2:
                self.run("table.delay = 0.001")
            if rng.random() < 0.4:
                self.run(
                    "beside = vattn.KVCache(vattn.KVConfig(num_layers=1, num_kv_heads=1, head_dim=32, dtype='float32', "
                    "max_batch_size=2, max_context_len=200, eager_pages=0, watermark=0), pool=pool)"
                )
                self.run("slot = beside.alloc_reqid()")
        self.make()

    def make(self) -> None:
        """A new cache."""
        rng = self.rng
        layers = rng.choice((1, 2, 2, 3))
        window = rng.choice((1, 3, 9, 20, 50))
        kinds = rng.choice(("full", "full", "sliding", "mixed", "mixed"))
        windows = [
            window if kinds == "sliding" or (kinds == "mixed" and rng.random() < 0.5) else None for _ in range(layers)
        ]
        if kinds == "full":
            config = f"LlamaConfig(num_hidden_layers={layers})"
        else:
            types = ["full_attention" if each is None else "sliding_attention" for each in windows]
            config = f"MistralConfig(num_hidden_layers={layers}, sliding_window={window}, layer_types={types})"
        wide = rng.choice((16, 32, 64, 64, 128))
        dims = [(wide, rng.choice((wide, wide, wide, 16, 0)))] * layers
        if rng.random() < 0.25:
            dims = [(rng.choice((16, wide)), wide) for _ in range(layers)]
        coded = rng.random() < 0.25
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        limit = rng.choice((40, 200, 200, 400))
        most = rng.choice((None, None, 2, 4, _MOST_ROWS))
        options: dict[str, Any] = {"max_context_len": limit, "max_batch_size": most}
        pooled = self.pooled and rng.random() < 0.9
        ample = not self.tight
        if not pooled:
            if rng.random() < 0.5:
                options["memory_budget"] = _PAGE * (rng.choice((40, 100, 300)) if self.tight else 20_000)
            else:
                ample = True
            options |= {"page_size": _PAGE, "guard": self.guard}
            if "memory_budget" in options and rng.random() < 0.15:
                options["zero_on_free"] = True
        elif self.zeroing:
            options["zero_on_free"] = True
        if rng.random() < 0.5:
            options["overlap"] = False
        for name, values in (
            ("layout", ("layer", "sliced", "fused")),
            ("kv_order", ("NHD", "HND")),
            ("watermark", (0.0, 0.2)),
            ("eager_pages", (0, 1)),
            ("deferred_reclamation", (True, True, False)),
        ):
            if rng.random() < 0.3:
                options[name] = rng.choice(values)
        if coded:
            options["kv_cache_dtype"] = "int8"
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        name = self.next("c")
        self.run(f"{name} = vattn.VirtualCache({config}, {text}{', pool=pool' if pooled else ''})")
        several = len({pair for pair, each in zip(dims, windows, strict=True) if each is not None}) > 1
        self.caches[name] = Under(
            Plain(windows, dims, dtype, coded), rng.choice((1, 2)), limit, most, ample, pooled, several
        )

    # Calls

    def attempt(
        self,
        name: str,
        code: str,
        after: Plain,
        *,
        expected: Sequence[type[Exception]] = (),
        moves: bool = False,
        empties: bool = False,
        fails: bool = True,
    ) -> bool:
        """Makes a call that turns what a cache holds into `after`; whether it did.

        Args:
            code: a statement, or an expression.
            expected: errors that may come, after which the cache is as before.
            moves: the cache leaves its memory to what was taken from it.
            empties: a failure may leave the cache empty.
            fails: a driver call may fail.
        """
        under = self.caches[name]
        before, empty = under.plain, self.emptied(under.plain)
        self.calls += 1
        self.counts[_word(code)] += 1
        allowed = [*expected]
        if not under.ample:
            allowed.append(vattn.OutOfPages)
        tearing, self.tearing = self.tearing, False
        wrapped = self.interrupted(code, torn=tearing) if tearing or self.rng.random() < 0.04 else None
        if wrapped is not None:
            code = wrapped
        elif fails and under.pooled and self.faulty and (self.failing or self.rng.random() < 0.25):
            self.run(f"table.fail({self.rng.randint(1, 12)}, {self.rng.choice((2, 999))})")
            self.armed = True
        where = len(self.lines)
        self.line(code)
        try:
            exec(compile(code, "<campaign>", "exec"), self.names)
        except KeyboardInterrupt:
            if wrapped is None:
                raise
            self.lines[where] = f"try:\n    {code}\nexcept KeyboardInterrupt: pass"
            self.counts["interrupts"] += 1
            self.unsure(name)
            self.settle(name, [after, before, empty])
            return False
        except Exception as error:
            kind = type(error).__name__
            failed = self.took_failure(error)
            if not isinstance(error, vattn.VattnError):
                raise Found(f"untyped {kind} from a cache", f"{code}: {error}") from error
            self.stop_if_broken()
            if not isinstance(error, (*allowed, *([vattn.DriverError, vattn.OutOfPages] if failed else []))):
                raise Found(f"unexpected {kind}", f"{code}: {error}") from error
            self.lines[where] = f"try:\n    {code}\nexcept vattn.{kind}: pass"
            self.counts[kind] += 1
            if self.rng.random() < 0.1:
                self.close_where_it_failed(name, where)
                return False
            self.unsure(name)
            self.settle(name, [before, empty] if empties else [before], failed=True)
            if empties and not under.plain.length:
                self.lost = name, before.rows
            return False
        finally:
            self.armed = False
            if tearing and wrapped is not None:
                self.note_places()
        under.plain = after
        if moves:
            self.leave(name, before)
        return True

    def interrupted(self, code: str, *, torn: bool = False) -> str | None:
        """A call that is interrupted somewhere, if it has so many places; None where that cannot be written.

        Args:
            torn: in code of `vattn.hf`, at any of its places alike: they are few beside those of the caches below, and
                what has to change together is changed between them. Or where one of these has done what it was asked.
        """
        (statement,) = ast.parse(code).body
        target, call = "", code
        if isinstance(statement, ast.Assign):
            assigned, call = code.split(" = ", 1)
            match statement.targets[0]:
                case ast.Attribute(attr=attribute):
                    call = f"setattr({assigned.removesuffix('.' + attribute)}, {attribute!r}, {call})"
                case ast.Name():
                    target = f"{assigned} = "
                case _:
                    return None
        elif not isinstance(statement, ast.Expr):
            return None
        event = self.rng.choice(("call", "check", "done") if torn else ("call", "check"))
        if torn and _word(code) == "assign" and self.rng.random() < 0.8:
            event = "check"  # an assignment enters few functions, and writes between them
        how = self.rng.choice(("raise", "signal"))
        if torn:
            self.place = _word(code), event
            more = 2 if event == "done" else 20
            nth = self.rng.randint(1, more + self.places[self.place] * 5 // 4)  # a longer call shows more of them
            part = "" if event == "done" else ", 'hf'"
            return f"{target}interrupted(lambda: {call}, {event!r}, {nth}, {how!r}{part})"
        return f"{target}interrupted(lambda: {call}, {event!r}, {int(10 ** self.rng.uniform(0, 3.3))}, {how!r})"

    def note_places(self) -> None:
        """Learns how far the call that was torn came."""
        self.places[self.place] = max(self.places[self.place], events())

    def emptied(self, plain: Plain) -> Plain:
        return Plain(plain.windows, plain.dims, plain.dtype, plain.coded, None, 0, plain.recording)

    def took_failure(self, error: Exception) -> bool:
        """Whether the failure that was asked for has happened."""
        table = self.names.get("table")
        if table is None or table.failed is None:
            return False
        table.failed = None
        self.counts["driver failures"] += 1
        return True

    def stop_if_broken(self) -> None:
        """Ends the scenario where a pool's mappings are unknown, and it says so."""
        if self.pooled and self.names["pool"]._core.mapper.broken:
            raise Stopped

    def close_where_it_failed(self, name: str, where: int) -> None:
        """In the `except` block, whose traceback keeps what the call had."""
        self.lines[where] = self.lines[where].replace(": pass", f": {name}.close()")
        under, storage = self.caches[name], self.names[name]._storage
        pool, owned = storage._pool, storage._owns_pool
        exec(f"{name}.close()", self.names)
        self.counts["closed in except"] += 1
        under.closed = True
        self.leave(name, under.plain)
        if self.kept or self.loose or pool is None:
            return
        if (table := self.names.get("table")) is not None and table.failed:
            return  # what could not be given back goes with the next call
        if owned and pool._core.usable:
            raise Found("a traceback keeps a pool", f"{name}: {pool.total_pages - pool.free_pages} pages")
        if under.pooled:
            users = [len(self.names[each]._storage.open_caches()) for each in self.open() if self.caches[each].pooled]
            if pool.caches > sum(users) + ("beside" in self.names):
                raise Found("a traceback keeps caches", f"{pool.caches}, and {users} are in use")

    def settle(self, name: str, candidates: list[Plain], *, failed: bool = False) -> None:
        """Finds out which of these a cache holds after a call that did not return."""
        under, cache = self.caches[name], self.names[name]
        self.stop_if_broken()
        lengths = {layer.get_seq_length() for layer in cache.layers}
        if len(lengths) > 1:
            if failed:
                raise Found("a failed call leaves layers of different lengths", f"{sorted(lengths)}")
            self.run(f"{name}.reset()")  # a forward pass did not end
            self.leave(name, under.plain)
            candidates = [self.emptied(under.plain)]
        for plain in candidates:
            if self.holds(name, plain):
                under.plain = plain.copy()
                if not failed or under.several:
                    # What an interrupt lets go of is not promised, nor what one of several windows has given back.
                    under.plain.floor = under.plain.length
                return
        what = "an interrupted call" if not failed else "a failed call"
        raise Found(f"{what} leaves other contents", f"{name}: {lengths}, not {[c.length for c in candidates]}")

    def holds(self, name: str, plain: Plain) -> bool:
        cache = self.names[name]
        if any(layer.get_seq_length() != plain.length for layer in cache.layers):
            return False
        return not plain.length or not self.difference(name, plain, public=False)

    # What was taken

    def attached(self, name: str) -> list[str]:
        return [key for key, kept in self.kept.items() if kept.cache == name]

    def contents(self, kept: Kept) -> Tensor:
        """What a kept tensor has to show."""
        if kept.copied is not None:
            return kept.copied
        plain = kept.left if kept.cache is None else self.caches[kept.cache].plain
        assert plain is not None
        return kept.part(plain)

    def leave(self, name: str, before: Plain) -> None:
        """The cache has moved on from the memory in which this was."""
        left = before.copy()
        for key in self.attached(name):
            self.kept[key].cache, self.kept[key].left = None, left

    def unsure(self, name: str) -> None:
        """After a call that did not return: nobody says whether the cache has moved on, so it is asked."""
        if self.attached(name) and not self.names[name]._storage._lent:
            self.leave(name, self.caches[name].plain)

    # Comparisons

    def look(self) -> None:
        """Compares everything."""
        for name, under in self.caches.items():
            if under.closed:
                continue
            plain, cache = under.plain, self.names[name]
            lengths = [layer.get_seq_length() for layer in cache.layers]
            if lengths != [plain.length] * len(lengths):
                raise Found("lengths", f"{name}: {lengths} instead of {plain.length}")
            if plain.length and (found := self.difference(name, plain, public=False)):
                raise Found("wrong contents", f"{name}: {found}")
        for key, kept in self.kept.items():
            found, wanted = torch.as_tensor(self.names[key]), self.contents(kept)
            if found.shape != wanted.shape or not torch.equal(found, wanted):
                raise Found("a tensor that was taken has changed", f"{key}: {kept.cache}, layer {kept.layer}")
        if self.guard == "zero":  # otherwise what is read after its forward pass may be a fault
            for pair in (pair for key in self.loose for pair in self.names[key]):
                for tensor in pair:
                    (tensor + 0).sum()
        if self.bystander:
            held = self.names["beside"].layer(0)[0][self.names["slot"], : self.bystander, 0, 0]
            if not torch.equal(held, torch.arange(self.bystander, dtype=torch.float32)):
                raise Found("wrong contents beside the caches", f"{held}")

    def difference(self, name: str, plain: Plain, *, public: bool) -> str:
        """Where a cache shows something else; empty if nowhere. Publicly, what rows share comes to an end."""
        cache = self.names[name]
        for index, layer in enumerate(cache.layers):
            if public:
                found = [layer.keys, layer.values]
            else:
                view = cache._storage.views[index]
                if view is None:
                    return f"layer {index} shows nothing"
                found = list(view.read(plain.first_seen(index, plain.length), plain.length))
            for side in range(2):
                if not same(found[side], plain.seen(index, side), coded=plain.coded):
                    return f"layer {index}, {'KV'[side]}, {list(found[side].shape)}"
        return ""

    def check(self) -> None:
        """Compares the books with what is mapped; the worker is waited for."""
        for name in self.open():
            with_table = "with table.transparent(): " if self.faulty else ""  # a check makes calls of its own
            try:
                self.run(f"{with_table}{name}.check()")
                if self.caches[name].plain.length:
                    stats = self.names[name].stats()
                    parts = (stats.owned_pages, stats.parked_pages, stats.cached_pages, stats.other_pages)
                    if min(parts) < 0 or sum(parts) + stats.free_pages != stats.budget_pages:
                        raise Found("stats do not add up", f"{name}: {stats}")
            except vattn.VattnError:
                self.stop_if_broken()
                raise
            except AssertionError as error:
                raise Found("check()", f"{name}: {error}") from error

    def check_kernel(self) -> None:
        """Compares the library's books with the kernel's, which takes long."""
        for _ in range(50):  # a worker may be creating memory ahead of need
            if self.faulty or not (wrong := books.disagreement()):
                return
            time.sleep(0.02)
        raise Found("the library's books are not the kernel's", wrong)

    # Operations

    def open(self) -> list[str]:
        return [name for name, under in self.caches.items() if not under.closed]

    def filled(self) -> list[str]:
        return [name for name in self.open() if self.caches[name].plain.length]

    def pick(self, names: list[str]) -> str:
        """One of them; mostly the one of the operation before, so that operations meet."""
        if self.focus not in names or (not self.staying and self.rng.random() < 0.25):
            self.focus = self.rng.choice(names)
        return self.focus

    def perform(self) -> None:
        """Draws an operation and makes it."""
        rng = self.rng
        lost, self.lost = self.lost, None
        if lost is not None and rng.random() < 0.7:
            self.refill(*lost)
            return
        choices: list[tuple[float, Callable[[], None]]] = [(1, self.bystand), (0.4, self.fork)]
        if len(self.open()) < 3:
            choices.append((2 if self.open() else 20, self.make))
        if self.open():
            choices += [(14, self.update), (1, self.trim), (0.7, self.close), (0.7, self.drop), (2, self.record)]
            choices += [(1, self.odd)]
        if self.filled():
            choices += [(5, self.crop), (10, self.move), (1, self.reset), (3, self.assign), (4, self.write)]
            choices += [(4, self.keep), (2.5, self.duplicate), (1, self.unfinished), (2, self.read), (1, self.ask)]
            choices += [(3, self.tear), (3, self.refuse)]
        if self.kept:
            choices += [(3, self.write_kept), (3, self.drop_kept)]
        if self.loose:
            choices.append((1, self.drop_loose))
        ((_, drawn),) = rng.choices(choices, [weight for weight, _ in choices])
        drawn()

    def refill(self, name: str, rows: int) -> None:
        """As many rows again after they were lost, and back from there: nothing of what was lost limits them."""
        self.focus = name
        self.add(name, self.rng.choice((17, 33, 70)), rows)
        if self.caches[name].plain.length:
            self.crop_to(name, self.rng.randint(1, self.caches[name].plain.length))

    def refuse(self) -> None:
        """An update that fails on its way, then as far back as before it; in a copy first: it has what windows kept."""
        rng = self.rng
        filled = self.filled()
        mixed = [each for each in filled if len({window is None for window in self.caches[each].plain.windows}) == 2]
        name = self.pick([each for each in mixed if self.caches[each].pooled] or filled)
        rows = self.caches[name].plain.rows
        self.add(name, rng.choice((1, 2, 5)), rows)
        if name not in self.filled():
            return
        before = self.caches[name].plain.length
        self.failing = True
        self.add(name, rng.choice((1, 17, 33, 70)), rows)
        self.failing = False
        if name not in self.filled() or self.caches[name].plain.length != before:
            return
        if rng.random() < 0.7:
            self.focus = name
            self.duplicate()
        for each in dict.fromkeys(([*self.caches][-1], name)):
            if each in self.filled():
                self.crop_to(each, self.caches[each].plain.floor)

    def update(self) -> None:
        rng = self.rng
        name = self.pick(self.open())
        under = self.caches[name]
        tokens = rng.choice((1, 5, 17, 33, 70) if self.staying else (1, 1, 1, 2, 5, 17, 33, 70))
        self.add(name, tokens, under.plain.rows or min(rng.choice((1, 1, 2, 3, 4)), under.most or 4))

    def add(self, name: str, tokens: int, rows: int) -> None:
        """An update of all layers."""
        rng = self.rng
        under = self.caches[name]
        plain = under.plain
        code = f"new({rng.randrange(1 << 30)}, {rows}, {under.heads}, {tokens}, {plain.dims}, {plain.dtype})"
        self.run(f"new_rows = {code}")
        after = plain.copy()
        after.update(self.names["new_rows"])
        expected = [vattn.InvalidLength] if plain.length + tokens > under.limit else []
        code = f"seen = [{name}.update(*rows, i) for i, rows in enumerate(new_rows)]"
        made = self.attempt(name, code, after, expected=expected, moves=plain.windowed)
        self.run("del new_rows")
        if not made:
            return
        if expected:
            raise Found("more than max_context_len", name)
        self.compare_seen(under, plain.length, tokens)
        if rng.random() < 0.1:
            self.loose.append(self.next("s"))
            self.run(f"{self.loose[-1]} = seen")
        self.run("del seen")

    def compare_seen(self, under: Under, start: int, tokens: int) -> None:
        """What an update returned, and what SDPA makes of it."""
        plain = under.plain
        assert plain.held is not None
        for index, (keys, values) in enumerate(self.names["seen"]):
            first = plain.first_seen(index, start)
            wanted = [side[:, :, first:] for side in plain.held[index]]
            if tokens == 1 and self.rng.random() < 0.3 and 0 not in plain.dims[index]:
                query = torch.randn(plain.rows, under.heads * 2, 1, plain.dims[index][0]).to(plain.dtype)
                found = scaled_dot_product_attention(query, keys, values, enable_gqa=True).double()
                exact = [(side + 0).double() for side in (keys, values)]
                right = scaled_dot_product_attention(query.double(), *exact, enable_gqa=True)
                error = 2e-2 if plain.dtype == torch.bfloat16 else 4e-3
                if not torch.allclose(found, right, atol=error, rtol=error):
                    raise Found("wrong attention", f"layer {index}, {float((found - right).abs().max())}")
            for side, found in enumerate((keys + 0, values + 0)):
                if not same(found, wanted[side], coded=plain.coded):
                    raise Found("an update returns other rows", f"layer {index}, {'KV'[side]}, from {start}")

    def crop(self) -> None:
        rng = self.rng
        name = self.pick(self.filled())
        plain = self.caches[name].plain
        back = plain.length - plain.floor
        gone = rng.choice((0, 1, 2, back, rng.randint(0, back), rng.randint(0, plain.length), plain.length))
        if self.tearing and rng.random() < 0.5:
            gone = rng.randint(back, min(back + 9, plain.length))  # a little further than is promised
        self.crop_to(name, max(0, plain.length - gone))

    def crop_to(self, name: str, kept: int) -> None:
        """A crop that keeps so many tokens, said in either way."""
        rng = self.rng
        plain = self.caches[name].plain
        gone = plain.length - kept
        after = plain.copy()
        after.crop(kept)
        refusable = plain.windowed and 0 < kept < plain.floor
        self.attempt(
            name,
            f"{name}.crop({kept if kept and rng.random() < 0.3 else -gone})",
            after,
            expected=[vattn.InvalidLength] if refusable else [],
            moves=gone > 0,
        )

    def move(self) -> None:
        """Rows are replaced, repeated, or left out."""
        rng = self.rng
        name = self.pick(self.filled())
        under = self.caches[name]
        count = under.plain.rows
        way = rng.choice(("reorder", "reorder", "repeat", "select", "mask") if count > 1 else ("repeat", "select"))
        if way == "repeat":
            times = rng.choice((1, 2, 2, 3))
            rows = [row for row in range(count) for _ in range(times)]
            code = f"{name}.batch_repeat_interleave({times})"
        elif way == "mask":
            mask = [rng.random() < 0.6 for _ in range(count)]
            mask[rng.randrange(count)] = True
            rows = [row for row in range(count) if mask[row]]
            code = f"{name}.batch_select_indices(torch.tensor({mask}))"
        elif way == "select":
            rows = [rng.randrange(count) for _ in range(rng.randint(1, count + 1))]
            code = f"{name}.batch_select_indices(torch.tensor({rows}))"
        else:
            rows = [rng.randrange(count) for _ in range(count)]
            if rng.random() < 0.3:
                rows = rng.sample(range(count), count)
            code = f"{name}.reorder_cache(torch.tensor({rows}))"
        after = under.plain.copy()
        after.take(rows)
        if len(rows) > _MOST_ROWS:
            return
        refused = [vattn.ConfigError] if len(rows) > (under.most or _MOST_ROWS) else []
        if self.attempt(name, code, after, expected=refused, moves=True, empties=True) and refused:
            raise Found("more rows than max_batch_size", code)

    def tear(self) -> None:
        """Interrupted calls on one cache, each between two that are not: what it left half done, the last one meets."""
        rng = self.rng
        filled = self.filled()
        windowed = [name for name in filled if self.caches[name].plain.windowed]  # they go back before all is decided
        self.focus = rng.choice(windowed if windowed and rng.random() < 0.7 else filled)
        self.staying = True
        for _ in range(rng.randint(2, 6)):
            torn = _TORN_CODED if self.caches[self.focus].plain.coded else _TORN
            for calls in ({"update": 1}, torn, _MEETING):
                if not self.caches[self.focus].plain.length:
                    calls = {"update": 1}
                (call,) = rng.choices(list(calls), list(calls.values()))
                self.tearing, self.lost = calls is torn, None
                getattr(self, call)()
                self.tearing = False
                if self.caches[self.focus].closed:  # where a call has failed
                    self.staying = False
                    return
                self.look()
            self.check()
        self.staying = False

    def reset(self) -> None:
        name = self.pick(self.filled())
        self.attempt(name, f"{name}.reset()", self.emptied(self.caches[name].plain), moves=True)

    def assign(self) -> None:
        rng = self.rng
        name = self.pick(self.filled())
        plain = self.caches[name].plain
        layer, side = rng.randrange(len(plain.dims)), rng.randrange(2)
        attribute = f"{name}.layers[{layer}].{('keys', 'values')[side]}"
        after = plain.copy()
        if not plain.coded and rng.random() < 0.3:
            after.seen(layer, side).mul_(2)
            self.attempt(name, f"{attribute} *= 2", after)
            return
        shown = plain.seen(layer, side)
        seed = rng.randrange(1 << 30)
        code = f"torch.randn({list(shown.shape)}, generator=torch.Generator().manual_seed({seed})).to({shown.dtype})"
        after.write(layer, side, eval(code, self.names))
        self.attempt(name, f"{attribute} = {code}", after, moves=True)

    def write(self) -> None:
        """To what is handed out."""
        rng = self.rng
        name = self.pick(self.filled())
        plain = self.caches[name].plain
        layer, side, row = rng.randrange(len(plain.dims)), rng.randrange(2), rng.randrange(plain.rows)
        attribute = f"{name}.layers[{layer}].{('keys', 'values')[side]}"
        after = plain.copy()
        shown = after.seen(layer, side)
        tokens = shown.shape[2]
        first = rng.randint(0, tokens)
        if rng.random() < 0.5:
            code = f"{attribute}[{row}, :, {first}:] = {rng.randint(-9, 9)}"
            target, value = shown[row, :, first:], float(code.rsplit(" ", 1)[1])
            if not plain.coded:
                target.fill_(value)
        else:
            code = f"{attribute}.neg_()"
            if not plain.coded:
                shown.neg_()
        self.attempt(name, code, after)

    def read(self) -> None:
        """All that is handed out, or copied."""
        name = self.pick(self.filled())
        under = self.caches[name]
        if not under.ample:
            return
        self.calm()
        self.run(f"for keys, values, _ in {name}: (keys + 0).sum(), (values + 0).sum()")
        self.run("keys = values = None")
        if found := self.difference(name, under.plain, public=True):
            raise Found("other contents are handed out", f"{name}: {found}")

    def keep(self) -> None:
        rng = self.rng
        name = self.pick(self.filled())
        plain = self.caches[name].plain
        if len(self.kept) > 5:
            return
        layer, side = rng.randrange(len(plain.dims)), rng.randrange(2)
        row = rng.randrange(plain.rows) if rng.random() < 0.3 else None
        code = f"{name}.layers[{layer}].{('keys', 'values')[side]}" + ("" if row is None else f"[{row}]")
        way = rng.choice(("", "", "dlpack", "numpy"))
        if way == "dlpack":
            code = f"torch.from_dlpack({code})"
        elif way == "numpy" and plain.dtype != torch.bfloat16:
            code = f"{code}.numpy()"
        key = self.next("k")
        if not self.attempt(name, f"{key} = {code}", plain) or key not in self.names:
            self.names.pop(key, None)
            return
        first = plain.first_seen(layer, plain.length)
        self.kept[key] = Kept(name, layer, side, first, plain.length, row)
        if plain.coded:
            self.kept[key].cache, self.kept[key].copied = None, torch.as_tensor(self.names[key]).clone()

    def write_kept(self) -> None:
        key = self.rng.choice(list(self.kept))
        kept, value = self.kept[key], self.rng.randint(-9, 9)
        self.calls += 1
        self.run(f"{key}[...] = {value}")
        self.contents(kept).fill_(value)

    def drop_kept(self) -> None:
        key = self.rng.choice(list(self.kept))
        del self.kept[key]
        self.run(f"del {key}")

    def drop_loose(self) -> None:
        self.run(f"del {self.loose.pop(0)}")

    def duplicate(self) -> None:
        rng = self.rng
        name = self.pick(self.filled())
        under = self.caches[name]
        if len(self.open()) >= 4:
            if not self.staying:
                return
            self.drop(rng.choice([each for each in self.open() if each != name]))
        way = rng.choice(("copy.copy({})", "copy.deepcopy({})", "pickle.loads(pickle.dumps({}))"))
        copied = self.next("c")
        made = self.attempt(name, f"{copied} = {way.format(name)}", under.plain)
        if not made or copied not in self.names:
            self.names.pop(copied, None)
            return
        pooled = under.pooled and "pickle" not in way
        self.caches[copied] = Under(
            under.plain.copy(), under.heads, under.limit, under.most, under.ample, pooled, under.several
        )
        if under.pooled and not pooled:
            self.caches[copied].ample = True

    def unfinished(self) -> None:
        """A forward pass of the first layers only."""
        rng = self.rng
        name = self.pick(self.filled())
        under = self.caches[name]
        plain = under.plain
        tokens = rng.choice((1, 5))
        if len(plain.dims) < 2 or plain.length + 2 * tokens > under.limit:
            return
        layers = rng.randint(1, len(plain.dims) - 1)
        seed = rng.randrange(1 << 30)
        rows = f"new({seed}, {plain.rows}, {under.heads}, {tokens}, {plain.dims}, {plain.dtype})"
        before = self.caches[name].plain
        self.run(f"new_rows = {rows}")
        code = f"for i in range({layers}): {name}.update(*new_rows[i], i)"
        begun = self.attempt(name, code, plain.copy(), moves=plain.windowed)
        if begun:
            for refused in (f"{name}.update(*new_rows[0], 0)", f"{name}.reorder_cache(torch.tensor([0]))"):
                self.line(f"try: {refused}\nexcept vattn.VattnError as error: assert 'did not end' in str(error)")
                try:
                    exec(refused, self.names)
                except vattn.VattnError as error:
                    if "did not end" not in str(error):
                        raise Found("another refusal after a pass that did not end", str(error)) from error
                else:
                    raise Found("a pass follows one that did not end", refused)
            self.calm()
            try:
                self.run(f"{name}.crop({plain.length})")
            except vattn.OutOfPages:  # what was taken is in the way
                if under.ample:
                    raise
                self.lines[-1] = f"try: {self.lines[-1]}\nexcept vattn.OutOfPages: {name}.reset()"
                exec(f"{name}.reset()", self.names)
                under.plain = self.emptied(plain)
            under.plain.floor = under.plain.length
            self.leave(name, before)
        self.run("del new_rows")

    def record(self) -> None:
        rng = self.rng
        name = self.pick(self.open())
        plain = self.caches[name].plain
        if not plain.windowed:
            return
        self.calls += 1
        if rng.random() < 0.7:
            self.run(f"{name}.activate_past_recording()")
            plain.recording = True
        else:
            self.run(f"for layer in {name}.layers:\n    if layer.is_sliding: layer.record_past = False\ndel layer")
            plain.recording = False

    def trim(self) -> None:
        name = self.pick(self.open())
        self.attempt(name, f"{name}.trim()", self.caches[name].plain)

    def ask(self) -> None:
        """Calls that look; a check makes driver calls of its own, which must not fail."""
        name = self.pick(self.filled())
        self.calm()
        code = self.rng.choice((f"{name}.stats()", f"{name}.check()", f"repr({name})"))
        self.attempt(name, code, self.caches[name].plain, fails=False)

    def close(self) -> None:
        name = self.pick(self.open())
        before = self.caches[name].plain
        self.calls += 1
        self.counts["close"] += 1
        if self.rng.random() < 0.2:
            self.line(f"try: {self.interrupted(f'{name}.close()')}\nexcept KeyboardInterrupt: pass")
            exec(self.lines[-1], self.names)
        self.run(f"{name}.close()")
        self.caches[name].closed = True
        self.leave(name, before)

    def drop(self, name: str = "") -> None:
        name = name or self.rng.choice(list(self.caches))
        before = self.caches[name].plain
        self.counts["del"] += 1
        self.run(f"del {name}")
        del self.caches[name]
        self.leave(name, before)

    def fork(self) -> None:
        self.counts["fork"] += 1
        self.calls += 17 * len(self.open())
        code = f"forked([{', '.join(self.open())}])"
        self.line(f"assert not (found := {code}), found")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = eval(code, self.names)
        if found:
            raise Found("in a forked child", found)

    def odd(self) -> None:
        """Arguments that make no sense."""
        rng = self.rng
        name = self.pick(self.open())
        under = self.caches[name]
        plain = under.plain
        if not plain.length:
            return
        rows, tokens, (k_dim, v_dim) = plain.rows, rng.choice((1, 3)), plain.dims[0]
        k = f"torch.zeros({rows}, {under.heads}, {tokens}, {k_dim}, dtype={plain.dtype})"
        v = f"torch.zeros({rows}, {under.heads}, {tokens}, {v_dim}, dtype={plain.dtype})"
        code = rng.choice(
            (
                f"update({k}, {v}[:, :, :0], 0)",
                f"update({k}.repeat(2, 1, 1, 1), {v}.repeat(2, 1, 1, 1), 0)",
                f"update({k}[0], {v}[0], 0)",
                f"update({k}.double(), {v}.double(), 0)",
                f"update({k}, {v}, 99)",
                f"reorder_cache(torch.tensor([{rows}]))",
                "reorder_cache(torch.tensor([0.5]))",
                "batch_repeat_interleave(0)",
                "batch_repeat_interleave(None)",
                f"batch_select_indices(torch.ones({rows + 1}, dtype=torch.bool))",
                "batch_select_indices(torch.tensor([[0]]))",
                "crop(0.5)",
                "crop(True)",
                "layers[0].__setattr__('keys', torch.zeros(3))",
                "layers[0].__setattr__('values', None)",
            )
        )
        if self.attempt(name, f"{name}.{code}", plain, expected=[vattn.ConfigError, vattn.InvalidLength]):
            raise Found("an odd argument is accepted", code)

    def bystand(self) -> None:
        """A request of the KVCache on the same pool."""
        if "beside" not in self.names:
            return
        self.calls += 1
        self.calm()
        length = self.rng.randint(1, 200)
        try:
            self.run(f"beside.step({{slot: {length}}})")
        except vattn.OutOfPages:
            self.lines[-1] = f"try: {self.lines[-1]}\nexcept vattn.OutOfPages: pass"
            return
        self.run(f"beside.layer(0)[0][slot, :{length}] = torch.arange({length}, dtype=torch.float32)[:, None, None]")
        self.bystander = length

    # The end

    def end(self) -> None:
        """Closes or drops everything, in any order; what was taken stays as it was until then."""
        rng = self.rng
        self.calm()
        for name in rng.sample(list(self.caches), len(self.caches)):
            before = self.caches[name].plain
            if rng.random() < 0.5:
                self.run(f"{name}.close()")
            self.run(f"del {name}")
            del self.caches[name]
            self.leave(name, before)
            self.look()
        for key in list(self.kept):
            if rng.random() < 0.5:
                self.run(f"{key}[...] = 1")
            self.run(f"del {key}")
        for key in self.loose:
            self.run(f"del {key}")
        if "beside" in self.names:
            self.run("beside.close()")
        if self.pooled:
            self.run("pool.close()")


def _word(code: str) -> str:
    """What a statement is counted as."""
    found = re.search(r"\.(update|crop|reset|trim|\w+_\w+|copy|deepcopy|dumps)\(", code)
    if found and "layers[" not in code:
        return found[1]
    return "assign" if re.search(r"(keys|values) \*?= ", code) else "write" if "layers[" in code else code


def scenario(rng: random.Random) -> Played:
    """A world, and what is done in it."""
    from vattn.pool import shared as shared_pool

    shared_pool.KEPT_BYTES = 0
    gc.collect()
    before = usage()
    opened = books.read() if rng.random() < 0.2 else None  # the kernel looks at every page for this
    played = Played()
    world = World(rng)
    played.lines, played.counts = world.lines, world.counts
    drains = rng.choice((0.0, 0.2, 1.0))
    try:
        world.begin()
        for _ in range(rng.choice((15, 40, 80, 150))):
            world.perform()
            world.look()
            if rng.random() < drains:
                world.check()
        world.check()
        if opened is not None:
            world.check_kernel()
        world.end()
    except Stopped:
        played.counts["refused to go on"] += 1
    except Found as found:
        played.kind, played.detail = found.kind, str(found)
    played.calls = world.calls
    if played.kind is None:
        world.names.clear()
        shared_pool._pools.clear()
        gc.collect()
        if remains := left(before) or (books.left(opened) if opened is not None else ""):
            played.kind, played.detail = "something is left behind a world", remains
    return played
