"""Random arguments: a call refuses them with an error of vattn's, and changes nothing; or it takes them for what
`operator.index` says.
"""

from __future__ import annotations

import operator
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import vattn
from tests.campaign.contents import text
from tests.campaign.model import Request
from tests.campaign.operations import SALTS, Admit, Alloc, Commit, Fork, Free, Operation, Step
from tests.campaign.play import Played, play
from tests.campaign.scenarios import Drawer, draw_config
from tests.campaign.world import CacheUnderTest, Call, Found, Refused, World, tokens_code


class Index:
    """What says that it is an integer."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class BadIndex:
    """What says so and then is not."""

    def __index__(self):
        raise ValueError("not now")


NAMES = {"Index": Index, "BadIndex": BadIndex}

# Of a number.
_DRESSED = (
    "{}",
    "float({})",
    "{}.5",
    "str({})",
    "[{}]",
    "({},)",
    "Index({})",
    "np.int8({})",
    "np.uint8({})",
    "np.int16({})",
    "np.int32({})",
    "np.int64({})",
    "np.float32({})",
    "np.array({})",
    "np.array([{}])",
    "torch.tensor({})",
    "torch.tensor({}, dtype=torch.int16)",
    "torch.tensor({}, dtype=torch.uint8)",
    "torch.tensor({}.0)",
    "torch.tensor([{}])",
    "complex({})",
)
_ODD = (
    "None",
    "True",
    "False",
    "float('nan')",
    "float('inf')",
    "-1",
    "2**31",
    "2**63",
    "-2**63",
    "10**400",
    "''",
    "'seven'",
    "b'7'",
    "[]",
    "{}",
    "{0: 1}",
    "object()",
    "BadIndex()",
    "np.bool_(True)",
    "np.float64('nan')",
    "torch.tensor(True)",
    "torch.tensor([1, 2])",
    "torch.tensor([])",
    "Ellipsis",
    "int",
)


def evaluated(code: str) -> Any:
    """What an argument is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return eval(code, {"np": np, "torch": torch} | NAMES)


def _meaning(code: str) -> int | None:
    """The integer that an argument stands for, or None."""
    try:
        return operator.index(evaluated(code))
    except Exception:
        return None


def argument(rng: random.Random, number: int) -> tuple[str, int | None]:
    """An argument, often that number in some dress, and what it means."""
    while True:
        code = rng.choice(_DRESSED).format(number) if rng.random() < 0.6 else rng.choice(_ODD)
        try:
            evaluated(code)
        except (OverflowError, RuntimeError):  # the number is no such thing
            continue
        return code, _meaning(code)


@dataclass(frozen=True)
class Odd(Operation):
    """A call with an argument of an odd kind.

    Attributes:
        code: the call, with "@" where the argument is.
        argument: it.
        inner: the operation that it stands for, if the argument stands for anything.
        errors: may come besides vattn's own.
        harmless: it may be accepted, whatever it means.
    """

    code: str
    argument: str
    inner: Operation | None = None
    labels: tuple[int, ...] = ()
    errors: tuple[type[Exception], ...] = ()
    harmless: bool = False

    def perform(self, world: World) -> None:
        each = world.caches[self.cache]
        if not each.open or any(label not in each.model.requests for label in self.labels):
            return
        made = self.inner.call(world) if self.inner is not None else Call("")
        if made is None:
            return
        world.names.update(NAMES)
        call = replace(
            made,
            code=f"{each.name}.{self.code.replace('@', self.argument)}",
            expected=(vattn.VattnError, *self.errors),
        )
        try:
            value = world.call(call)
        except Refused:
            return
        world.counts["odd arguments accepted"] += 1
        if self.inner is not None:
            self.inner.accept(world, value)
        elif not self.harmless:
            raise Found(f"{call.name} accepts {self._what()}", f"{call.code} returned {value!r}")
        self._look(world)

    def _what(self) -> str:
        try:
            return type(evaluated(self.argument)).__name__
        except Exception:
            return self.argument

    def _look(self, world: World) -> None:
        """Nothing but plain integers may be stored."""
        each = world.caches[self.cache]
        for pages in each.it.page_map():
            for name in ("reqid", "length", "mapped", "pages"):
                if type(value := getattr(pages, name)) is not int:
                    raise Found(
                        f"a {type(value).__name__} is stored as {name}", f"{value!r}", f"print({each.name}.page_map())"
                    )

    def moved(self, by: int) -> Operation:
        inner = None if self.inner is None else self.inner.moved(by)
        return replace(self, cache=self.cache + by, inner=inner)

    def simpler(self) -> Iterator[Operation]:
        if self.inner is not None and isinstance(self.inner, Commit | Free | Fork):
            return
        for plain in ("None", "0.5"):
            if self.inner is None and self.argument != plain:
                yield replace(self, argument=plain)


class Fuzzer(Drawer):
    """Draws odd arguments among other operations."""

    def __init__(self, rng: random.Random, share: float) -> None:
        super().__init__(rng)
        self._share = share

    def draw(self, world: World) -> Operation:
        if self.rng.random() > self._share:
            return super().draw(world)
        number = self.rng.randrange(len(world.caches))
        each = world.caches[number]
        if not each.open:
            return super().draw(world)
        calls: list[Callable[[int, CacheUnderTest], Operation | None]] = [
            self._alloc_hint, self._alloc_start, self._admit_token, self._admit_salt, self._admit_all, self._step_all,
            self._pages, self._layer,
        ]  # fmt: skip
        if each.model.requests:
            calls += [self._step_length, self._step_length, self._step_slot, self._step_ahead, self._step_sequence]
            calls += [self._free_slot, self._fork_slot, self._commit_slot, self._commit_tokens]
        return self.rng.choice(calls)(number, each) or super().draw(world)

    def _argument(self, number: int) -> tuple[str, int | None]:
        return argument(self.rng, number)

    def _running(self, each: CacheUnderTest) -> int:
        return self.rng.choice(list(each.model.requests))

    def _alloc_hint(self, number: int, each: CacheUnderTest) -> Operation:
        code, meaning = self._argument(self.rng.randrange(each.context))
        label = self.next_label()
        inner = Alloc(number, label) if meaning is not None or code == "None" else None
        return Odd(number, "alloc_reqid(@)", code, inner)

    def _alloc_start(self, number: int, each: CacheUnderTest) -> Operation:
        code, meaning = self._argument(self.rng.randrange(each.context))
        label = self.next_label()
        inner = Alloc(number, label, start=meaning) if meaning is not None and meaning >= 0 else None
        return Odd(number, "alloc_reqid(start=@)", code, inner)

    def _admit_token(self, number: int, each: CacheUnderTest) -> Operation:
        rng = self.rng
        admit = Admit(number, self.next_label(), self._near_block(each, 1), self._stream())
        tokens = text(admit.stream, 0, admit.length)
        at = rng.randrange(admit.length)
        code, meaning = self._argument(tokens[at])
        listed = ", ".join("@" if i == at else str(token) for i, token in enumerate(tokens))
        form = rng.choice(("admit([{}])", "admit(({},))"))
        if meaning == tokens[at]:
            return Odd(number, form.format(listed), code, admit)
        if meaning is not None and -(2**63) <= meaning < 2**63:  # other tokens: nothing that the model has
            return Other(number, form.format(listed), code, length=admit.length)
        return Odd(number, form.format(listed), code)

    def _admit_salt(self, number: int, each: CacheUnderTest) -> Operation:
        code, _ = self._argument(7)
        if code.startswith("b'"):
            code = "bytearray(3)"
        return Odd(number, "admit([1, 2], @)", code)

    def _admit_all(self, number: int, each: CacheUnderTest) -> Operation | None:
        code, _ = self._argument(3)
        try:
            if all(isinstance(operator.index(token), int) for token in evaluated(code)):
                return None  # token ids like others, or none
        except (TypeError, ValueError):
            pass
        return Odd(number, "admit(@)", code)

    def _step_length(self, number: int, each: CacheUnderTest) -> Operation:
        label = self._running(each)
        code, meaning = self._argument(self._length(each, label))
        inner = Step(number, {label: (meaning, self._stream())}) if meaning is not None else None
        if meaning is not None and not 0 <= meaning <= each.context:
            inner = None
        return Odd(number, f"step({{r{label}: @}})", code, inner, (label,))

    def _step_slot(self, number: int, each: CacheUnderTest) -> Operation | None:
        label = self._running(each)
        code, meaning = self._argument(each.model.slots[label])
        length = self._length(each, label)
        try:
            hash(evaluated(code))
        except TypeError:
            return None
        slots = {slot: label for label, slot in each.model.slots.items()}
        inner = Step(number, {slots[meaning]: (length, 0)}) if meaning in slots else None
        return Odd(number, f"step({{@: {length}}})", code, inner, tuple(each.model.requests))

    def _step_ahead(self, number: int, each: CacheUnderTest) -> Operation | None:
        label = self._running(each)
        length = self._length(each, label)
        if self.rng.random() < 0.3:
            code, meaning = self._argument(each.model.slots[label])
            try:
                hash(evaluated(code))
            except TypeError:
                return None
            fine = meaning in each.model.slots.values()
            ahead = f"{{@: {length}}}"
        else:
            code, meaning = self._argument(self.rng.randint(length, each.context))
            fine = meaning is not None and 0 <= meaning <= each.context
            ahead = f"{{r{label}: @}}"
        inner = Step(number, {label: (length, self._stream())}) if fine else None
        return Odd(number, f"step({{r{label}: {length}}}, {ahead})", code, inner, (label,))

    def _step_sequence(self, number: int, each: CacheUnderTest) -> Operation:
        label = self._running(each)
        slot = each.model.slots[label]
        code, meaning = self._argument(self._length(each, label))
        inner = None
        if meaning is not None and 0 < meaning <= each.context:
            inner = Step(number, {label: (meaning, self._stream())})
        listed = ", ".join("@" if i == slot else "0" for i in range(each.slots))
        form = self.rng.choice(("step([{}])", "step(({},))"))
        # Not named: what is 0, or stands for it.
        harmless = meaning == 0
        return Odd(number, form.format(listed), code, inner, (label,), harmless=harmless)

    def _step_all(self, number: int, each: CacheUnderTest) -> Operation | None:
        code, _ = self._argument(3)
        if code == "{}" or (code == "{0: 1}" and 0 in each.model.slots.values()):
            return None
        if each.slots == 2 and code == "torch.tensor([1, 2])":
            return None
        if each.slots == 1 and code.endswith(("]", "])", ",)")):
            return None
        return Odd(number, "step(@)", code)

    def _free_slot(self, number: int, each: CacheUnderTest) -> Operation:
        return self._slot(number, each, "free_reqid(@)", lambda label: Free(number, label))

    def _fork_slot(self, number: int, each: CacheUnderTest) -> Operation:
        child = self.next_label()
        return self._slot(number, each, "fork(@)", lambda label: Fork(number, label, child))

    def _commit_slot(self, number: int, each: CacheUnderTest) -> Operation:
        label = self._running(each)
        request = each.model.requests[label]
        tokens = tokens_code(request.upto(request.length))
        slot = each.model.slots[label]
        code, meaning = self._argument(slot)
        inner = Commit(number, label) if meaning == slot else None
        if meaning != slot and meaning in each.model.slots.values():
            code, inner = "None", None
        return Odd(number, f"commit(@, {tokens})", code, inner, (label,))

    def _commit_tokens(self, number: int, each: CacheUnderTest) -> Operation | None:
        label = self._running(each)
        request = each.model.requests[label]
        tokens = request.tokens[: request.length]
        if not tokens:
            return None
        at = self.rng.randrange(len(tokens))
        code, meaning = self._argument(tokens[at])
        if meaning is not None and meaning != tokens[at]:
            return None  # a caller that lies
        listed = ", ".join("@" if i == at else str(token) for i, token in enumerate(tokens))
        inner = Commit(number, label) if meaning is not None else None
        return Odd(number, f"commit(r{label}, [{listed}])", code, inner, (label,))

    def _slot(self, number: int, each: CacheUnderTest, code: str, inner: Callable[[int], Operation]) -> Operation:
        argument, meaning = self._argument(each.model.slots[self._running(each)])
        slots = {slot: label for label, slot in each.model.slots.items()}
        labels = tuple(each.model.requests)
        return Odd(number, code, argument, inner(slots[meaning]) if meaning in slots else None, labels)

    def _pages(self, number: int, each: CacheUnderTest) -> Operation:
        code, meaning = self._argument(self.rng.randrange(each.context))
        form = self.rng.choice(("pages_needed(@)", "pages_needed(9, chunk_tokens=@)"))
        fine = meaning is not None or (code == "None" and "chunk" in form)
        return Odd(number, form, code, harmless=fine)

    def _layer(self, number: int, each: CacheUnderTest) -> Operation:
        code, meaning = self._argument(0)
        return Odd(number, "layer(@)", code, errors=(IndexError,), harmless=meaning in each.it.layers)


@dataclass(frozen=True)
class Other(Odd):
    """An admission of tokens that no text of the model's has: it is ended again."""

    length: int = 0

    def perform(self, world: World) -> None:
        each = world.caches[self.cache]
        if not each.open:
            return
        world.names.update(NAMES)
        code = f"{each.name}.{self.code.replace('@', self.argument)}"
        try:
            value = world.call(Call(code, "r0, cached", (vattn.VattnError,)))
        except Refused:
            return
        each.model.query_tokens += self.length
        each.model.hit_tokens += value.cached_tokens
        world.names["r0"] = value.reqid
        each.model.requests[0] = Request(SALTS[0], [], value.cached_tokens, 0)
        each.model.slots[0] = value.reqid
        world.call(Call(f"{each.name}.free_reqid(r0)"))
        del each.model.requests[0], each.model.slots[0]


def scenario(rng: random.Random, *, operations: int = 80) -> Played:
    """So many operations, many of them with an odd argument."""
    config, drawer = draw_config(rng), Fuzzer(rng, 0.6)
    return play(config, lambda world: drawer.operations(world, operations))
