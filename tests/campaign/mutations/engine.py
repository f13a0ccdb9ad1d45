"""Mutations of the engine."""

from __future__ import annotations

import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

from tests.campaign.mutations import mutation


def _replaced(owner: Any, name: str, old: str, new: str) -> None:
    """A method of `owner` with one part of its source in place of another."""
    method = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(method))
    assert old in source, f"{name} has changed"
    module = inspect.getmodule(method)
    exec("from __future__ import annotations\n" + source.replace(old, new), vars(module))
    setattr(owner, name, vars(module).pop(name))


@mutation("second campaign", "what a static batch reserves counts as computed", "engine")
def reserved_is_computed() -> None:
    from vattn.engine.core import EngineCore

    _replaced(EngineCore, "_plan", "self.kv.prepare(dict.fromkeys(plan.reserve, 0))", "pass")


@mutation("second campaign", "a static batch is made of an empty queue", "engine")
def empty_batch() -> None:
    from vattn.engine.scheduling.static import StaticScheduler

    _replaced(StaticScheduler, "schedule", "and self.waiting and", "and")


@mutation("second campaign", "outputs count as told before the step returns", "engine")
def lost_outputs() -> None:
    from vattn.engine.core import EngineCore

    def collect(self: Any) -> None:
        changed = dict.fromkeys(request.parent_id for request in self._changed)
        groups = [group for name in changed if (group := self._groups.get(name)) is not None]
        outputs = [output for group in groups if (output := group.output()) is not None]
        for group in groups:
            if not group.unfinished():
                del self._groups[group.request_id]
        self._changed.clear()
        self._outputs += outputs

    EngineCore._collect = collect  # type: ignore[method-assign]


@mutation("second campaign", "an interrupted constructor leaves its attention in the model", "engine")
def model_is_kept() -> None:
    from vattn.engine import loading
    from vattn.engine.core import EngineCore

    loading.weakref = SimpleNamespace(finalize=lambda *_: SimpleNamespace())  # type: ignore[attr-defined]
    _replaced(EngineCore, "__init__", "opened.callback(loaded.close)", "pass")


@mutation("second campaign", "log probabilities of structured outputs are from before the mask", "engine")
def unmasked_logprobs() -> None:
    from vattn.engine import core

    core.exclude = lambda logits, rows, grammars: None


@mutation("second campaign", "beams are scored at a temperature", "engine")
def warm_beams() -> None:
    from vattn.engine.beam_search import BeamGroup

    true = BeamGroup.advance
    BeamGroup.advance = (  # type: ignore[method-assign]
        lambda self, beams, logits, scheduler: true(self, beams, logits / (self._params.temperature or 1), scheduler)
    )


@mutation("engine", "log probabilities of a prompt may be no numbers", "engine")
def prompt_without_numbers() -> None:
    from vattn.engine.core import EngineCore

    _replaced(EngineCore, "_note_prompt_logprobs", "math.isnan(report[target].logprob)", "False")


@mutation("engine", "a scored beam that lost its slot is scored again", "engine")
def scored_again() -> None:
    from vattn.engine.beam_search import BeamGroup
    from vattn.engine.scheduling.scheduler import Scheduler

    _replaced(Scheduler, "schedule", "if request.scored:", "if False:")
    _replaced(BeamGroup, "advance", "beam.scored for", "beam.scored and not beam.num_uncomputed_tokens for")


@mutation("second campaign", "any key of a prompt is accepted", "engine")
def any_key() -> None:
    from vattn.engine.requests import prompts

    prompts._KEYS = type("Any", (), {"__contains__": lambda self, key: True})()


@mutation(None, "prompts with different salts share prefixes", "engine")
def one_salt() -> None:
    from vattn.engine.requests.request import Request

    true = Request.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        true(self, *args, **{**options, "cache_salt": b""})

    Request.__init__ = init  # type: ignore[method-assign]


@mutation(None, "a cache that is copied back is not the one that was copied out", "engine")
def wrong_copy() -> None:
    from vattn.engine.kv.base import PlainStore

    true = PlainStore.copy_in
    PlainStore.copy_in = (  # type: ignore[method-assign]
        lambda self, layer, batch, rows: true(self, layer, batch, [tensor.flip(0) for tensor in rows])
    )


@mutation(None, "a copy of a cache is kept when its request ends", "engine")
def kept_copy() -> None:
    from vattn.engine.scheduling.swap import SwapSpace

    SwapSpace.forget = lambda self, request: None  # type: ignore[method-assign]


@mutation(None, "every drafted token is accepted", "engine")
def any_draft() -> None:
    from vattn.engine.core import EngineCore

    _replaced(EngineCore, "_compute", "(token,):", "drafts.get(request, ())[ahead : ahead + 1] and (token, 0)[:1]:")


@mutation(None, "completions of a prompt draw the same random numbers", "engine")
def one_stream() -> None:
    from vattn.engine.requests.intake import Intake

    _replaced(Intake, "make_groups", "seed=seed + index", "seed=seed")


@mutation(None, "a fork does not copy the block that is not whole", "engine")
def shared_rest() -> None:
    from vattn.engine.kv.paged import PagedKV
    from vattn.engine.kv.paged_windows import PagedWindowsKV

    PagedKV._copy_block = lambda self, origin, target: None  # type: ignore[method-assign]
    PagedWindowsKV._copy_block = (  # type: ignore[method-assign]
        lambda self, origin, target: self.windows.back([target]) and None
    )


@mutation(None, "what a failed request published stays in the prefix cache", "engine")
def poisoned_prefixes() -> None:
    from vattn.engine import core
    from vattn.engine.scheduling.scheduler import Scheduler

    _replaced(Scheduler, "release", "request.finish_reason is FinishReason.ERROR", "False")
    _replaced(core.EngineCore, "_publish", "forward.finite.get(entry.request)", "entry.request in forward.finite")
    core._keep_back = lambda forward: None


@mutation("engine", "completions of a prompt that is not finite publish it", "engine")
def forked_prefixes() -> None:
    from vattn.engine import core

    keep_back, fork = core._keep_back, core.EngineCore._fork
    core._keep_back = lambda forward: None

    def forked_first(self: Any, forward: Any, forked: Any) -> Any:
        result = fork(self, forward, forked)
        keep_back(result)
        return result

    core.EngineCore._fork = forked_first  # type: ignore[method-assign]


@mutation(None, "sleep keeps the prefix cache", "engine")
def wakeful_prefixes() -> None:
    from vattn.engine.core import EngineCore

    _replaced(EngineCore, "sleep", "self.kv.evict_prefixes()", "pass")


@mutation(None, "an interrupt leaves the books as they are", "engine")
def no_mending() -> None:
    from vattn.engine.core import EngineCore

    def mend(self: Any, error: BaseException) -> None:
        self._torn = ""

    EngineCore._mend = mend  # type: ignore[method-assign]
