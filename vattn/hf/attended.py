"""Keys and values whose attention is computed by vattn's own kernels, where torch's SDPA would be slower.

The cache returns tensors of a subclass, for which a call of SDPA goes to the kernels of `vattn.attention.attend` where
these can compute it: decode steps, prompts, chunks and drafts, with padding on the left or a sliding window. The
model's attention is not changed. Masks are read to see what they hide, once a step.

transformers repeats the keys and values of grouped heads where there is a mask and more than one query; here nothing
is copied until something else than SDPA needs it. Where the kernels cannot compute a decode step, the queries of a KV
head are folded into rows, `[batch, num_kv_heads, group, head_dim]`, which is several times as fast as SDPA's
`enable_gqa` in bfloat16.

Of a cache in 8 bits, keys and values are another subclass: the kernels read its codes as they are stored, and any other
operation sees the keys or values that they stand for.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.context import get_spawning_popen
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from vattn import cpu
from vattn.quantised import dequantise


class Attended(Tensor):
    """Keys or values `[batch, num_kv_heads, tokens, head_dim]` for which SDPA computes as this module says."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1 and not all(issubclass(kind, Attended) for kind in types):
            # A mask or a weight with behaviour of its own, which is asked with plain keys and values.
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = tree_map_only(Attended, as_plain, (args, kwargs or {}))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            if func in _REPEATING and not kwargs and (repeated := _repeated(func, *args)) is not None:
                return repeated
            if func in _COPYING:
                args = tree_map_only(Attended, as_plain, args)
            return func(*args, **(kwargs or {}))

    def __copy__(self) -> Tensor:
        """Another tensor of the same memory, as torch has it."""
        return as_plain(self).detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy of what this shows. torch would copy, and write to files, all the memory that the cache reserves."""
        return as_plain(self).detach().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(*copy.deepcopy(self).__reduce_ex__(protocol))


class _Lazy(Attended):
    """What is computed when an operation needs it; from then on this is a tensor of its own."""

    _plain: Tensor | None

    def _compute(self) -> Tensor:
        raise NotImplementedError

    @property
    def is_read(self) -> bool:
        """Whether an operation needed them."""
        return self._plain is not None

    def plain(self) -> Tensor:
        """The keys or values, in contiguous memory."""
        if self._plain is None:
            self._plain = self._compute()
        return self._plain

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub of torch says it is no class method
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(_Lazy, _Lazy.plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.plain())


class Coded(_Lazy):
    """Keys or values of which codes and scales are stored."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Coded:
        made: Coded = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made._plain = codes, scales, None
        return made

    def _compute(self) -> Tensor:
        room = torch.empty(self.codes.shape, dtype=self.dtype, device=self.codes.device)
        return dequantise(self.codes, self.scales, room)


class Repeated(_Lazy):
    """The keys or values `rows`, those of each KV head as often as it has queries.

    `[batch, num_kv_heads * times, tokens, head_dim]`, or on the way there `[batch, num_kv_heads, times, tokens,
    head_dim]`.
    """

    rows: Attended
    times: int

    @staticmethod
    def __new__(cls, rows: Attended, times: int, shape: tuple[int, ...]) -> Repeated:
        made: Repeated = Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)
        made.rows, made.times, made._plain = rows, times, None
        return made

    def _compute(self) -> Tensor:
        batch, kv_heads, tokens, head_dim = self.rows.shape
        opened = as_plain(self.rows)[:, :, None].expand(batch, kv_heads, self.times, tokens, head_dim)
        return opened.contiguous().view(self.shape)  # as other operations take its strides to be


# The operations of transformers' `repeat_kv`, and the index of the first.
_REPEATING = {Tensor.__getitem__, Tensor.expand, Tensor.reshape}
_OPENED = (slice(None), slice(None), None, slice(None), slice(None))
_OPENING = [*map(type, _OPENED)]
# These refuse subclasses, before any dispatch.
_COPYING = {Tensor.__array__, Tensor.numpy, Tensor.tolist}


def as_plain(rows: Tensor) -> Tensor:
    """Keys or values as a tensor without behaviour of its own: the same memory, or what is computed from it."""
    return rows.plain() if isinstance(rows, _Lazy) else rows.as_subclass(Tensor)


def reduced(load: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `__reduce__` returns where the tensors in the arguments are copies that nothing else holds."""
    if get_spawning_popen() is None:
        return load, arguments
    # They go to a process that is being started: torch would send descriptors of the tensors' memory, which have to be
    # open until it has started. These tensors are not.
    return _load_bytes, (pickle.dumps((load, arguments)),)


def _load_bytes(saved: bytes) -> Any:
    load, arguments = pickle.loads(saved)
    return load(*arguments)


def _repeated(func: Callable[..., Any], rows: Any, *given: Any) -> Repeated | None:
    """A step of `repeat_kv`: `rows[:, :, None, :, :]`, `expand`, `reshape`; None for anything else."""
    if not isinstance(rows, Attended) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if func is Tensor.__getitem__:
        (index,) = given
        # Types first: tensors in an index are compared element by element.
        if rows.dim() != 4 or not isinstance(index, tuple) or [*map(type, index)] != _OPENING or index != _OPENED:
            return None
        batch, kv_heads, tokens, head_dim = rows.shape
        return Repeated(rows, 1, (batch, kv_heads, 1, tokens, head_dim))
    if not isinstance(rows, Repeated) or rows.dim() != 5 or rows.is_read:
        return None
    batch, kv_heads, tokens, head_dim = rows.rows.shape
    if func is Tensor.expand:
        if len(given) == 5 and rows.times == 1 and given == (batch, kv_heads, given[2], tokens, head_dim):
            return Repeated(rows.rows, int(given[2]), given) if given[2] > 0 else None
        return None
    if given == (whole := (batch, kv_heads * rows.times, tokens, head_dim)):
        return Repeated(rows.rows, rows.times, whole)
    return None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    rows = key, value
    if isinstance(key, Repeated) and isinstance(value, Repeated) and _are_repeated(query, key, value):
        rows = key.rows, value.rows
    suits = _suits(query, *rows, enable_gqa or rows[0] is not key)
    if suits and not dropout_p and _is_native(query, *rows):
        output = _by_kernels(query, *rows, attn_mask, is_causal, scale)
        if output is not None:
            return output
    key, value = (each.plain() if isinstance(each, _Lazy) else each for each in (key, value))
    single = suits and query.shape[2] == 1 and not is_causal
    if single and enable_gqa and (attn_mask is None or attn_mask.shape[-3:-1] == (1, 1)):
        batch, heads, _, head_dim = query.shape
        folded = query.reshape(batch, key.shape[1], -1, head_dim)
        output = scaled_dot_product_attention(folded, key, value, attn_mask, dropout_p, scale=scale)
        return output.reshape(batch, heads, 1, value.shape[3])
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _are_repeated(query: Tensor, key: Repeated, value: Repeated) -> bool:
    """Whether keys and values are repeated for these heads, and are still what they were made of."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[1] == key.shape[1] == value.shape[1]
        and key.times == value.times
        and not key.is_read
        and not value.is_read
    )


def _suits(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether there are queries and keys, in shapes that belong together. SDPA broadcasts others or refuses them; the
    kernels would read memory that is not there.
    """
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    batch, heads, queries, head_dim = query.shape
    rows, kv_heads, tokens, key_dim = key.shape
    return (
        queries > 0
        and tokens > 0
        and batch == rows
        and head_dim == key_dim
        and value.shape[:3] == key.shape[:3]
        and heads > 0
        and (heads == kv_heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0))
    )


def _is_native(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and query.dtype == key.dtype == value.dtype
        and cpu.refusal(query.dtype, key.shape[3], value.shape[3]) is None
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and not (query.is_neg() or key.is_neg() or value.is_neg())
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        # Not one without memory, of FakeTensorMode or torch.func. Last, as torch.compile cannot look into it.
        and type(query) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(query)
    )


def _by_kernels(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor | None:
    """SDPA's output, or None where the kernels do not know what a mask hides."""
    batch, heads, queries, head_dim = query.shape
    tokens = key.shape[2]
    if mask is None:
        pattern = _NOTHING_HIDDEN if queries == (tokens if is_causal else 1) else None
    else:
        pattern = None if is_causal else _last_mask.pattern(mask, batch, queries, tokens)
    if pattern is None or (pattern.folded and heads != key.shape[1]):
        return None
    stored, scales = [key, value], []
    if isinstance(key, Coded) and isinstance(value, Coded) and not key.is_read and not value.is_read:
        stored, scales = [key.codes, value.codes], [key.scales, value.scales]
    rows = [each.transpose(1, 2) for each in stored + scales]
    between = 0
    if any(pattern.hidden):
        # A slot for each token, which begins there: sequences are whole numbers of tokens apart, the same in all rows.
        apart = {divmod(each.stride(0), each.stride(1)) for each in rows} if batch > 1 else {(0, 0)}
        (between, rest), *others = apart
        if others or rest or between * batch + tokens > _MOST_SLOTS:
            return None
        rows = [each.as_strided(each.shape, (each.stride(1), *each.stride()[1:])) for each in rows]
    if pattern.folded or queries == 1:
        new, shape = 1, (batch, heads, queries)
        flat = query.reshape(batch, heads * queries, head_dim)
    else:
        new, shape = queries, (batch, queries, heads)
        flat = query.transpose(1, 2).reshape(batch * queries, heads, head_dim)
    requests = _requests(pattern.hidden, between, batch, new, tokens)
    output = query.new_empty(*shape, value.shape[3])
    cpu.attend(
        flat,
        *rows[:2],
        slots=requests.slots,
        lengths=requests.lengths,
        starts=requests.starts,
        scales=(rows[2], rows[3]) if scales else None,
        scale=scale,
        window=pattern.window,
        out=output,
    )
    if new == 1:
        return output
    if requests.unseen is not None:
        output.view(batch * queries, heads, -1)[requests.unseen] = 0
    return output.transpose(1, 2)


class _Pattern(NamedTuple):
    """What a mask hides besides keys after a query: the first `hidden` tokens of each sequence (none if it is empty),
    and tokens that are `window` or more before a query. `folded`: all queries see the same, as they are heads of one.
    """

    hidden: tuple[int, ...] = ()
    window: int | None = None
    folded: bool = False


_NOTHING_HIDDEN = _Pattern()
_MOST_SLOTS = 2**31 - 1  # they are counted in 32 bits


def _pattern(mask: Tensor, batch: int, queries: int, tokens: int) -> _Pattern | None:
    """None for a mask that hides something else, or all keys from a sequence."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or not mask.is_cpu:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(mask):
        return None
    sequences, _, rows, shown = mask.shape
    if sequences not in (1, batch) or rows not in (1, queries) or shown != tokens or rows > tokens:
        return None
    flags, folded = mask[:, 0], rows < queries
    if rows == 1 and bool(flags.all()):
        return _Pattern(folded=folded)
    first = flags[:, -1].to(torch.uint8).argmax(1)
    place = torch.arange(tokens, device="cpu")
    last = place[tokens - rows :, None]  # that each query sees
    causal = place <= last
    if torch.equal(flags, causal & (place >= first[:, None, None])) and bool(flags[:, -1, -1].all()):
        hidden: list[int] = first.tolist()
        return _Pattern(tuple(hidden * (batch // len(hidden))) if any(hidden) else (), folded=folded)
    window = tokens - int(first[0])
    if torch.equal(flags, (causal & (place > last - window)).expand_as(flags)):
        return _Pattern(window=window)
    return None


class _LastMask(local):
    """What the last mask hides: the layers of a step have the same one."""

    _mask: Callable[[], Tensor | None] = staticmethod(lambda: None)
    _state: tuple[int, ...] | None = None
    _found: _Pattern | None = None

    def pattern(self, mask: Tensor, batch: int, queries: int, tokens: int) -> _Pattern | None:
        # Inference tensors do not count their changes.
        state = None if mask.is_inference() else (mask._version, batch, queries, tokens)
        if state is None or self._mask() is not mask or self._state != state:
            self._found = _pattern(mask, batch, queries, tokens)
            self._mask, self._state = weakref.ref(mask), state
        return self._found


_last_mask = _LastMask()


class _Requests(NamedTuple):
    """As `vattn.attention.attend` takes them. `unseen`: queries that see no keys, whose output SDPA makes zero; as
    requests of their own they see those that are hidden.
    """

    slots: Tensor
    lengths: Tensor
    starts: Tensor | None
    unseen: Tensor | None


@lru_cache(maxsize=4)  # a step asks for the same in every layer
def _requests(hidden: tuple[int, ...], between: int, batch: int, new: int, tokens: int) -> _Requests:
    """One for each sequence of `tokens` tokens, of which the last `new` have queries.

    Args:
        hidden: tokens at its start that it does not see; then slots are tokens, of which a sequence has `between`.
    """
    slots: list[int] = []
    lengths: list[int] = []
    starts, unseen = [0], list[int]()
    for sequence in range(batch):
        first = hidden[sequence] if hidden else 0
        begin = sequence * between if hidden else sequence
        blind = max(0, new - (tokens - first))
        if blind:
            slots.append(begin + tokens - new)
            lengths.append(blind)
            unseen.extend(range(starts[-1], starts[-1] + blind))
            starts.append(starts[-1] + blind)
        slots.append(begin + first)
        lengths.append(tokens - first)
        starts.append(starts[-1] + new - blind)
    with torch.inference_mode(False):
        of = [torch.tensor(each, dtype=torch.int32, device="cpu") for each in (slots, lengths, starts)]
        blank = torch.tensor(unseen, device="cpu") if unseen else None
        return _Requests(of[0], of[1], of[2] if new > 1 else None, blank)
