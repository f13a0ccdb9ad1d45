"""Mutations of `vattn.attention`: of what Python decides. What kernels decide is compiled."""

from __future__ import annotations

import inspect
import textwrap
from types import ModuleType
from typing import Any

from tests.campaign.mutations import mutation
from vattn import cpu
from vattn.attention import base, plain, torch_sdpa


def _rewrite(module: ModuleType, name: str, *changes: tuple[str, str]) -> None:
    """Replaces a function by one whose source reads differently."""
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    for old, new in changes:
        assert old in source, f"{name} does not have {old!r}"
        source = source.replace(old, new)
    exec(f"from __future__ import annotations\n{source}", vars(module))


def _unchecked(what: str) -> None:
    """Numbers of requests of this kind may be anything."""

    def check(*args: Any, **numbers: Any) -> Any:
        found = true(*args, **numbers)
        return None if found is not None and found[0] == what else found

    true = cpu.check_requests
    cpu.check_requests = check


@mutation("decode", "starts may be anything", "attention")
def any_starts() -> None:
    _unchecked("starts")


@mutation("decode", "views that torch negates are read as they are", "attention")
def negated_views() -> None:
    _rewrite(plain, "_check_memory", ("tensor.is_neg() or tensor.is_conj()", "False"))


@mutation("decode", "tensors need no memory", "attention")
def no_memory() -> None:
    _rewrite(plain, "_check_memory", ("if not there:", "if False:"))


@mutation("decode", "sizes beyond 32 bits are taken", "attention")
def more_than_32_bits() -> None:
    _rewrite(plain, "_check_memory", ("size > _MOST", "False"))


@mutation("decode", "any layout passes for strided memory", "attention")
def any_layout() -> None:
    _rewrite(plain, "_check_memory", ("tensor.is_nested or tensor.layout != torch.strided", "False"))


@mutation("decode", "out may share memory with what is read", "attention")
def shared_out() -> None:
    _rewrite(plain, "_check_out", ("begin < last and first < end", "False"))


@mutation("decode", "numbers are compared in their own type", "attention")
def narrow_numbers() -> None:
    _rewrite(plain, "_checked_scale", ("abs(factor)", "abs(scale)"))
    _rewrite(base, "check_softcap", ("limits.tiny <= bound <= limits.max", "limits.tiny <= softcap <= limits.max"))
    plain.check_softcap = base.check_softcap


@mutation("decode", "a window may be any number", "attention")
def any_window() -> None:
    plain.check_window = lambda window: window  # type: ignore[assignment,return-value]


@mutation("decode", "a scale may be any number", "attention")
def any_scale() -> None:
    plain._checked_scale = lambda scale: scale  # type: ignore[assignment,return-value]


@mutation("decode", "a softcap may be any number", "attention")
def any_softcap() -> None:
    plain.check_softcap = lambda softcap: softcap  # type: ignore[assignment,return-value]


@mutation("decode", "scales may be anything that has two items", "attention")
def any_pair() -> None:
    plain._pair = lambda scales: None if scales is None else tuple(scales)  # type: ignore[assignment,return-value]


@mutation(None, "lengths may be anything", "attention")
def any_lengths() -> None:
    _unchecked("lengths")


@mutation(None, "block tables may name any block", "attention")
def any_block() -> None:
    _unchecked("blocks")


@mutation(None, "blocks behind a length have to be there", "attention")
def unused_blocks() -> None:
    def check(key: Any, rows: int, *, lengths: Any, block_table: Any, **numbers: Any) -> Any:
        found = true(key, rows, lengths=lengths, block_table=block_table, **numbers)
        if found is None and block_table is not None:
            whole = lengths.new_full(lengths.shape, block_table.shape[1] * key.shape[1])
            found = true(key, rows, lengths=whole, block_table=block_table, **numbers)
        return found

    true = cpu.check_requests
    cpu.check_requests = check


@mutation(None, "sinks are read as float32", "attention")
def narrow_sinks() -> None:
    _rewrite(cpu, "attend", ("sinks.to(torch.float32).contiguous()", "sinks"))


@mutation(None, "a window is a token longer", "attention")
def longer_window() -> None:
    _rewrite(cpu, "attend", ("min(window, _MOST)", "min(window + 1, _MOST)"))


@mutation("adapters", "a scale of 0 is the default beside a softcap", "attention")
def no_scale() -> None:
    _rewrite(torch_sdpa, "plain_attention", ("if params.scale is None else", "if not params.scale else"))


@mutation("adapters", "a softcap is computed in half precision", "attention")
def half_softcap() -> None:
    halves = ('query.device.type == "cpu"', "False")
    scores = (".to(exact)", ""), ("softmax(dim=-1)", "softmax(-1, torch.float32)")
    _rewrite(torch_sdpa, "plain_attention", halves, *scores)


@mutation(None, "the first key of a window is a token later", "attention")
def later_key() -> None:
    true = base.AttentionParams.first_key

    def first_key(self: Any, span: Any) -> int:
        first = true(self, span)
        return min(first + 1, span.start) if first else first

    base.AttentionParams.first_key = first_key  # type: ignore[method-assign]
