"""The errors themselves: what becomes of them on their way to another process."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import vattn
from vattn import errors

GIVEN = {
    "missing_pages": 3,
    "missing_bytes": 12288,
    "call": "cuMemCreate",
    "code": 2,
    "name": "CUDA_ERROR_OUT_OF_MEMORY",
    "limit": "RLIMIT_AS",
}
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.VattnError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_can_be_sent_and_copied(kind: type[errors.VattnError]) -> None:
    wanted = inspect.signature(kind.__init__).parameters.values()
    named = {each.name: GIVEN[each.name] for each in wanted if each.kind == each.KEYWORD_ONLY and each.name in GIVEN}
    error = kind("what is wrong", **named)
    error.add_note("where")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert str(other) == "what is wrong"
        assert vars(other) == vars(error)


def test_what_is_mapped_in_a_process_is_not_copied() -> None:
    pool = vattn.PagePool("1MiB")
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "max_batch_size": 2, "max_context_len": 64}
    cache = vattn.KVCache(vattn.KVConfig(**shape, dtype="float32"), pool=pool)  # type: ignore[arg-type]
    for each in (pool, cache):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"a {type(each).__name__} cannot be copied or pickled"):
                copied(each)  # type: ignore[operator]
    cache.close()
    pool.close()
