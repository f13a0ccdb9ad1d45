"""`EngineCore`: the loop that drives a model, a cache and a scheduler, under the faces `LLM` and `AsyncEngine`."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from vattn.broker.places import borrower_name, prefillers
from vattn.broker.share import parse_share
from vattn.errors import OutOfPages, VattnError
from vattn.integers import shown
from vattn.store.folder import PrefixStore
from vattn.units import format_bytes, parse_bytes

from .beam_search import take_beams
from .checks import checked_choice, whole, wrong
from .config import EngineConfig
from .exclusive import EngineAsleep, EngineBusy, EngineClosed, Gate, Use, exclusive
from .kv.base import KVBackend, NoPrefixCache
from .kv.make import make_backend
from .kv.rows import Rows
from .kv.spec import KVSpec, PoolShare
from .loading import LoadedModel
from .metrics import Figures, Metric, counted, held
from .model.fingerprint import check_hashable, fingerprint
from .model.forward import Forward, Row
from .model.runner import ModelRunner
from .model.sampler import Sampler
from .model.threads import Threads, end_team
from .requests.grammar import exclude
from .requests.intake import Intake
from .requests.logprobs import Logprob, token_logprobs
from .requests.outputs import RequestGroup, RequestOutput
from .requests.prompts import Prompt, PromptReader
from .requests.request import FinishReason, InvalidRequest, Request, Rest, State, check_request_id
from .requests.sampling import RequestOutputKind, SamplingParams
from .requests.text import TokenText
from .roles.decoder import RemotePrefills
from .roles.line import rest_of
from .scheduling.drafts import NgramProposer, SpeculationStats, SpeculativeConfig
from .scheduling.record import StepRecord
from .scheduling.scheduler import Entry, Scheduler, StepPlan
from .scheduling.static import StaticScheduler
from .scheduling.stored import StoredPrefixes
from .scheduling.swap import SwapSpace

logger = logging.getLogger(__name__)

# Which part of the books a call changes, or which part of a step is under way.
_QUEUES, _STEP, _ON_STEP = "queues", "step", "on_step"
# Seconds until memory that other engines have is asked for again.
_REST = 0.01
_WAKE_TAGS = ("weights", "kv_cache", "scheduling")
# Set, an engine checks itself whenever it has become idle.
_CHECK_VARIABLE = "VATTN_CHECK"


class EngineCore:
    """Requests in, outputs out, one step at a time.

    One thread at a time may use it, as `gate` sees to; `make_groups` and `close` may be called by any.

    Invariants: `_groups` has every request that has not ended, and only these are in the scheduler's queues. `_torn`
    names the change of the books that was interrupted; the next call mends them first.

    Attributes:
        loaded: the model and what belongs to it.
        kv: the cache.
        stored: what of it survives the engine; None for nothing.
        remote: what other engines compute of it; None for nothing.
        intake: makes requests of prompts.
        speculation: statistics of drafts so far.
        figures: running totals.
        threads: how many of them compute.
        asleep: between `sleep` and `wake_up`.
        on_step: called with a `StepRecord` after each step.

    Raises:
        ConfigError: the model cannot be loaded, or not be served as the config asks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.on_step = config.on_step
        self.speculation = SpeculationStats()
        self.figures = Figures()
        self.asleep = False
        self.gate = Gate()
        self.sampler = Sampler()
        self._on_closing: Callable[[], None] = _nothing
        self._names = itertools.count()
        self._groups: dict[str, RequestGroup] = {}
        self._closed = False
        self._checks = os.environ.get(_CHECK_VARIABLE, "") not in ("", "0")
        self._phase = ""  # which part of a step is under way
        self._torn = ""  # which change of the books is under way, or was interrupted
        self._changed: list[Request] = []  # requests with news for the next outputs
        self._outputs: list[RequestOutput] = []  # what no step has returned
        self.loaded = loaded = LoadedModel(config)
        with ExitStack() as opened:
            opened.callback(loaded.close)
            self.intake = Intake(
                PromptReader(loaded.tokenizer, loaded.vocab_size, loaded.max_model_len),
                TokenText(loaded.tokenizer),
                max_model_len=loaded.max_model_len,
                eos_token_ids=loaded.eos_token_ids,
                eos_token_id=loaded.eos_token_id,
                max_logprobs=config.max_logprobs,
                seed=config.seed,
            )
            opened.callback(self.intake.grammars.close)
            self._decode_token = self.intake.text.of_token
            self.kv = _make_kv(config, loaded)
            opened.callback(self.kv.close)
            self.stored = _make_stored(config, loaded, self.kv)
            if self.stored is not None:
                opened.callback(self.stored.close)
            self.remote = _make_remote(config, loaded, self.kv)
            if self.remote is not None:
                opened.callback(self.remote.close)
            # Where prompts of other engines are computed; not any more once this one shares nothing.
            self._rows = _make_rows(loaded, self.kv) if config.role == "prefill" and self.kv.sharing else None
            self.scheduler = _make_scheduler(config, loaded, self.kv, self.stored, self.remote)
            self._swap = self.scheduler.swap
            if not config.enforce_eager:
                loaded.optimize()
            self.runner = ModelRunner(
                loaded.model,
                self.kv,
                loaded.attention,
                latents=loaded.latents,
                shared=loaded.shape.shared,
                graphs_up_to=None if config.enforce_eager else config.max_num_seqs,
            )
            opened.callback(self.runner.close)
            self.threads = Threads(config.num_threads, on_cpu=loaded.model.device.type == "cpu")
            most_tokens = min(loaded.max_num_batched_tokens, loaded.max_model_len)
            self.threads.measure(self.runner.rehearse, {"decode": config.max_num_seqs, "prefill": most_tokens})
            self._opened = opened.pop_all()

    def close(self) -> None:
        """End all requests, free the cache and restore the model's attention. Idempotent.

        Waits for a step in another thread, whose `generate` then raises `EngineClosed`. A call from `on_step` takes
        effect when the outermost call on this engine ends, right after this one.

        Raises:
            StreamCapturing, DriverError: the cache has its memory still; call `close` again.
        """
        self.gate.closing = True
        self._on_closing()
        use = Use(threading.current_thread(), "close")
        try:
            if self.gate.wait(use):
                self._tear_down()
        finally:
            if self.gate.user is use:
                self.gate.user = None

    def _tear_down(self) -> None:
        if self._closed:
            return
        self._groups.clear()
        self._changed.clear()
        self._outputs.clear()
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        try:
            self._opened.close()
        except BaseException:
            self._opened.callback(self.kv.close)  # the next call tries it again
            raise
        self._closed = True

    @property
    def closing(self) -> bool:
        """Whether the engine is closed, or `close` waits for a step."""
        return self.gate.closing

    def lend(self, thread: threading.Thread, name: str, on_closing: Callable[[], None]) -> None:
        """Reserve the engine for one thread, which need not have started, until `end_loan`.

        Args:
            name: of the thread's owner, for the error that other threads get.
            on_closing: called by `close`, in the thread that calls it.

        Raises:
            EngineBusy: another thread uses the engine.
            EngineClosed: it is closed.
        """
        self.gate.enter(Use(thread, name, lent_in=os.getpid()))
        self._on_closing = on_closing
        end_team()
        if self.gate.closing:
            self.end_loan(thread)
            raise EngineClosed("this LLM is closed; make a new one")

    def end_loan(self, thread: threading.Thread) -> None:
        """End `lend`; no effect if the engine was not lent to this thread."""
        user = self.gate.user
        if user is not None and user.thread is thread:
            self._on_closing = _nothing
            self.gate.user = None
            if self.gate.closing:
                self.close()

    @property
    def publishes_prompts(self) -> bool:
        """Whether it computes prompts for other engines, and they find them."""
        return self._rows is not None

    @property
    def num_groups(self) -> int:
        """Prompts whose requests have not all ended."""
        return len(self._groups)

    def has_unfinished(self) -> bool:
        return bool(self._groups or self._outputs)

    def new_id(self) -> str:
        """A request id that no unfinished request has."""
        return next(name for name in map(str, self._names) if name not in self._groups)

    def make_group(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, kind: RequestOutputKind, priority: int = 0
    ) -> RequestGroup:
        """Check a prompt and build its requests, which `add_group` then queues. Any thread may do this.

        Raises:
            InvalidRequest: says what is wrong, with the name, the prompt or token ids in `sampling`.
            EngineClosed: the engine is closed.
        """
        check_request_id(request_id)
        (group,) = self.make_groups({request_id: prompt}, sampling, kind=kind, priority=priority)
        return group

    def make_groups(
        self, prompts: Mapping[str, Prompt], sampling: SamplingParams, *, kind: RequestOutputKind, priority: int = 0
    ) -> list[RequestGroup]:
        """As `make_group` for each of several prompts, by the names of their requests."""
        self._check_open()
        groups = self.intake.make_groups(prompts, sampling, kind=kind, priority=priority)
        self._check_open()  # a grammar may have taken seconds
        for group in groups:
            self.scheduler.check_fits(group.requests[0])
        return groups

    @exclusive
    def add_group(self, group: RequestGroup) -> None:
        """Queue what `make_group` made.

        Raises:
            InvalidRequest: an unfinished request has the same name.
            EngineBusy, EngineClosed: as for `generate`.
        """
        self._check_usable("add_request")
        if group.request_id in self._groups:
            raise InvalidRequest(
                f"a request {group.request_id!r} is unfinished; choose another name, or abort it first",
                param="request_id",
            )
        with self._mending(_QUEUES):
            for request in group.requests:
                self.scheduler.add(request)
            self._groups[group.request_id] = group

    @exclusive
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request with all its completions now, and free its memory.

        Returns:
            Its last output; None for a request that is unknown or finished.

        Raises:
            InvalidRequest: the name is no text.
            EngineBusy: another thread uses this LLM.
        """
        check_request_id(request_id)
        if self._closed:
            return None
        self._check_usable("abort", closing=False)
        group = self._groups.get(request_id)
        if group is None:
            return None
        with self._mending(_QUEUES):
            del self._groups[request_id]
            for request in group.unfinished():
                self.scheduler.finish(request, FinishReason.ABORT)
        self._count(group)
        self._check_if_idle()
        return group.output()

    @exclusive
    def step(self) -> list[RequestOutput]:
        """One iteration: see `LLM.step`."""
        self.check_steps("step")
        start = time.monotonic()
        accepted_before = self.speculation.num_accepted_tokens
        try:
            with self._mending(_STEP):
                self._phase = _STEP
                plan, num_preempted, prepare_seconds = self._plan()
                self.figures.preemptions += num_preempted
                planned = time.monotonic()
                decode_tokens = plan.num_decode_tokens
                if plan.entries:
                    before = [(entry.request, entry.request.last_token_time) for entry in plan.entries]
                    decodes = plan.num_tokens == len(plan.entries)
                    with self.threads.computing("decode" if decodes else "prefill", plan.num_tokens) as measuring:
                        self._compute(plan, measuring)
                    since = [last for request, last in before if last is not None and last != request.last_token_time]
                    self.figures.stepped(start, time.monotonic(), since)
                if self._swap is not None and 2 * decode_tokens < plan.num_tokens:
                    self._swap.observe_prefill(plan.num_tokens, time.monotonic() - planned)
            if plan.entries and self.on_step is not None:
                record = StepRecord(
                    start_time=start,
                    schedule_seconds=planned - start - prepare_seconds,
                    prepare_seconds=prepare_seconds,
                    forward_seconds=time.monotonic() - planned,
                    decode_tokens=decode_tokens,
                    prefill_tokens=plan.num_tokens - decode_tokens,
                    num_running=len(self.scheduler.running),
                    num_waiting=len(self.scheduler.waiting),
                    num_preempted=num_preempted,
                    kv=self.kv.stats(),
                    drafted_tokens=sum(len(entry.draft) for entry in plan.entries),
                    accepted_tokens=self.speculation.num_accepted_tokens - accepted_before,
                )
                self._phase = _ON_STEP
                self.on_step(record)
        finally:
            self._phase = ""
        self._collect()
        self._check_if_idle()
        outputs, self._outputs = self._outputs, []  # with no call after it
        return outputs

    @exclusive
    def sleep(self, level: int = 1) -> int:
        """See `LLM.sleep`."""
        self._check_usable("sleep")
        asked = whole(level)
        if asked != 1:
            raise wrong(
                "level",
                f"is {shown(level)}; the only one is 1, which gives the memory of the KV cache back: for the "
                "memory of the weights, too, close this LLM and make it again later",
            )
        freed = self.kv.trim()  # first, since a backend may refuse
        with self._mending(_QUEUES):
            self._preempt_all()
            self.kv.evict_prefixes()
            freed += self.kv.trim()
            self.asleep = True
        return freed

    @exclusive
    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """See `LLM.wake_up`."""
        self._check_usable("wake_up")
        if tags is not None:
            if isinstance(tags, str) or not isinstance(tags, Collection):
                raise wrong("tags", f"is {shown(tags)}; give a list of {', '.join(_WAKE_TAGS)}, or None for all")
            for tag in tags:
                checked_choice("tags", tag, _WAKE_TAGS)
        if tags is None or "kv_cache" in tags:
            self.asleep = False
        return not self.asleep

    @exclusive
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        self._check_usable("reset_prefix_cache")
        with self._mending(_QUEUES):
            if reset_running_requests:
                self._preempt_all()
            self.scheduler.drop_copies()
            self.kv.evict_prefixes()
            if not self.loaded.is_ours:  # its weights may be others now
                self.kv.stop_sharing()
                self._rows = None
                for source in self.scheduler.sources:
                    source.stop()
        if not self.loaded.is_ours:
            self.runner.weights_changed()
            self.loaded.pack_again()
        return not self.scheduler.running

    def _preempt_all(self) -> None:
        self.figures.preemptions += len(self.scheduler.running)
        self.scheduler.preempt_all()

    def _check_if_idle(self) -> None:
        """In a debug run: `check`, once no request is left. A violation is an AssertionError of the call."""
        if self._checks and not self._groups:
            self.check()

    def check(self) -> None:
        """Assert that the books of cache and queues are right and agree. For tests and idle moments."""
        self.kv.check()
        self.scheduler.check()
        if not self.scheduler.running:
            lost = self.kv.stats().used_bytes
            assert not lost, f"no request runs, but {lost} bytes of the cache are in use"
        unfinished = sum(len(group.unfinished()) for group in self._groups.values())
        assert unfinished == len(self.scheduler.running) + len(self.scheduler.waiting)

    def check_steps(self, name: str) -> None:
        """Refuse the call `name`, which runs steps, in the middle of one, asleep or closed."""
        self._check_usable(name)
        self.check_awake(name)
        if self._phase:
            raise EngineBusy(f"{name}() was called from on_step; the next step begins when this one has ended")

    def check_idle(self, name: str) -> None:
        """Refuse the call `name`, which runs its own requests to completion, while others are unfinished.

        Raises:
            VattnError: some are; their outputs would be lost.
            EngineAsleep: nothing could run.
            EngineBusy, EngineClosed: as for `add_group`.
        """
        self.check_steps(name)
        if unfinished := self.group_ids:
            raise VattnError(
                f"{name}() was called with {len(unfinished)} unfinished requests; finish or abort them first, or "
                "use add_request() and step()"
            )

    def abandon(self, error: BaseException) -> None:
        """Drop all requests; they are those of the call that is about to raise `error`."""
        self._torn = _STEP
        for group in self._groups.values():
            for request in group.requests:
                self.figures.ended(request)
        self._groups.clear()
        self._changed.clear()
        self._outputs.clear()
        self._mend(error)

    @contextmanager
    def _mending(self, what: str) -> Iterator[None]:
        """A change of queues and slots; if it is interrupted or fails unexpectedly, `_mend` repairs them."""
        self._torn = what
        try:
            yield
        except BaseException as error:
            self._mend(error)
            raise
        self._torn = ""

    def _mend(self, error: BaseException) -> None:
        """Restore the invariants after an interrupt at any point; if this is interrupted, too, the next call does it.

        `_groups` is right at any moment. An interrupted step may have left any running request half changed, so these
        fail. An interrupted change of the queues leaves requests intact, and each says whether it holds a slot.
        """
        ran = {*self.scheduler.running} if self._torn == _QUEUES else set()
        running, waiting = [], []
        fallen: dict[Request, None] = {}
        for group in self._groups.values():
            for request in group.requests:
                if request in ran and request.runs:
                    running.append(request)
                elif request.queued:
                    waiting.append(request)
                elif request.finished_time is None:  # the last that `finish` stores
                    fallen |= dict.fromkeys([request, *group.falls_with(request)])
                else:
                    request.slot = None
            if not group.unfinished():
                self._changed += group.requests
        for request in fallen:
            self._changed.append(request)
            request.fail(VattnError(f"a step of this request was interrupted by {type(error).__name__}"))
        self.sampler = Sampler()
        self.scheduler.restore(running, [request for request in waiting if request not in fallen])
        self._torn = ""

    def _check_open(self) -> None:
        if self.gate.closing:
            raise EngineClosed("this LLM is closed; make a new one")

    @exclusive
    def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        self._check_open()
        return [*held(self.scheduler, self.kv, asleep=self.asleep), *self.counted()]

    def counted(self) -> list[Metric]:
        """What it has counted so far; for any thread, at any time."""
        return counted(self.figures, self.scheduler, self.speculation)

    def check_awake(self, name: str) -> None:
        """Raise EngineAsleep while the engine sleeps."""
        if self.asleep:
            raise EngineAsleep(f"{name}() was called while the engine sleeps; call wake_up() first")

    def _check_usable(self, name: str, *, closing: bool = True) -> None:
        if closing:
            self._check_open()
        if self._phase == _STEP:
            raise EngineBusy(
                f"{name}() was called in the middle of a step, by a signal handler or the model; wait for it"
            )
        if self._torn:
            self._mend(KeyboardInterrupt())

    def _plan(self) -> tuple[StepPlan, int, float]:
        """A plan with its memory prepared, how many requests it preempted, and the seconds spent in `prepare`.

        The scheduler accounts for memory, so the backend rarely refuses: for guard rows, or limits of the driver. The
        request of the lowest rank is then preempted; a request that is refused alone fails, unless other engines have
        the memory, of a pool that lends it: then it waits.
        """
        preempted = 0
        seconds = 0.0
        refused = False
        while True:
            plan = self.scheduler.schedule(admit=not refused)
            preempted += len(plan.preempted)
            if not plan.entries:
                return plan, preempted, seconds
            start = time.monotonic()
            try:
                if plan.reserve:
                    self.kv.prepare(plan.reserve)
                    # Otherwise layers with a window would count what is reserved as computed, and give it back.
                    self.kv.prepare(dict.fromkeys(plan.reserve, 0))
                self.kv.prepare(plan.lengths, plan.next_lengths, look_ahead=not self.runner.launches)
                if all(self._load(request) for request in plan.requests):
                    return plan, preempted, seconds + time.monotonic() - start
            except OutOfPages as error:
                refused = True
                if len(self.scheduler.running) > 1:
                    self.scheduler.preempt_last()
                    preempted += 1
                elif error.may_pass and self._fits(plan.requests):
                    # What was got for it is lost, and would be in every try until others give the memory back.
                    self.scheduler.preempt_last(look_ahead=False)
                    time.sleep(_REST)
                    return StepPlan(), preempted + 1, seconds + time.monotonic() - start
                else:
                    self._fail(plan.requests, error)
            except VattnError as error:
                self._fail(plan.requests, error)
            seconds += time.monotonic() - start

    def _load(self, request: Request) -> bool:
        """Whether what the plan counts as computed is in the request's slot; a copy is brought back into it."""
        return request.saved is None or self._swap is None or self._swap.load(request)

    def _fits(self, requests: Sequence[Request]) -> bool:
        """Whether the cache could hold each of them alone, as far as its operator allows now."""
        return all(self.kv.needed(request.num_tokens) <= self.kv.total() for request in requests)

    def _compute(self, plan: StepPlan, measuring: AbstractContextManager[None]) -> None:
        """Run a prepared plan; requests that got a token or failed have news.

        Args:
            measuring: entered for what any step of so many tokens computes.
        """
        forked: list[Request] = []
        try:
            with measuring:
                forward = self.runner.run(plan.entries)
                if self.runner.launches:
                    self.kv.look_ahead()
                _keep_back(forward)
                forward = self._fork(forward, forked)
                forward, beams = take_beams(forward, self._groups)
                tokens = self.sampler.sample(forward.logits, forward.rows)
            reports = self._token_logprobs(forward, tokens)
            unscored = self._note_prompt_logprobs(forward)
        except Exception as error:
            self._fail([*plan.requests, *forked], error)
            return
        drafts: dict[Request, tuple[int, ...]] = {}
        for entry in plan.entries:
            entry.request.advance(entry.end - len(entry.draft))
            if entry.draft:
                drafts[entry.request] = entry.draft
            elif len(entry) > 1:
                self._publish(entry, forward)
        if unscored:
            reason = "the log probabilities of the prompt are no numbers: the model's logits are not finite"
            self._fail(unscored, FloatingPointError(reason))
        for place, ((request, ahead), token, report) in enumerate(zip(forward.rows, tokens, reports, strict=True)):
            self._changed.append(request)
            if request.finish_reason is not None or request.num_uncomputed_tokens:
                continue  # an earlier token of its draft was rejected, or ended the request
            self._accept(request, token, report, self.sampler.failures.get(place))
            if request.state is not State.DONE and drafts.get(request, ())[ahead : ahead + 1] == (token,):
                request.advance(request.num_tokens)
        self._settle_drafts(plan)
        for group, requests, logits in beams:
            self._changed += requests
            self.figures.generation_tokens += len(requests)
            if not requests[0].output_token_ids:
                self.figures.prompt_tokens += len(requests[0].prompt_token_ids)
            try:
                group.advance(requests, logits, self.scheduler)
            except Exception as error:
                self._fail(requests, error)

    def _accept(
        self, request: Request, token: int | None, report: dict[int, Logprob] | None, failure: Exception | None
    ) -> None:
        """Append a sampled token to a request, or end it: at its last token, or where there can be none.

        Args:
            token: None if none can be taken.
            report: the token's log probabilities, where they are asked for.
            failure: why there is no token, if the sampler says so.
        """
        if request.num_tokens == request.max_total_tokens:  # max_tokens=0: only the prompt was to be computed
            if token is None:  # of a chunk of one token, only its logits say that its keys and values are not finite
                request.publishes = False
            self._copy_rest(request)
            self.scheduler.finish(request, FinishReason.LENGTH)
            if request.index == 0:
                self.figures.prompt_tokens += len(request.prompt_token_ids)
            return
        if token is None:
            failure = failure or FloatingPointError("no token can be taken from the logits: they are not finite")
            failure.__traceback__ = None  # as in `_fail`
            self.scheduler.finish(request, FinishReason.ERROR, failure)
            return
        if report is not None and request.logprobs is not None:
            request.logprobs.append(report)
            request.cumulative_logprob += report[token].logprob
        try:
            request.append(token)
        except Exception as error:  # the tokenizer, which is not ours, cannot decode it
            self.scheduler.finish(request, FinishReason.ERROR, error)
            return
        self.figures.generation_tokens += 1
        if request.index == 0 and len(request.output_token_ids) == 1:
            self.figures.prompt_tokens += len(request.prompt_token_ids)
        if request.state is State.DONE:
            self.scheduler.release(request)

    def _publish(self, entry: Entry, forward: Forward) -> None:
        """Publish a chunk of a prompt to the prefix cache, if its keys and values are finite."""
        if forward.finite.get(entry.request):
            self.scheduler.publish(entry.request, since=entry.start)

    def _copy_rest(self, request: Request) -> None:
        """Copy what fills no block of a prompt that was computed, if that may be for another engine."""
        rest = rest_of(request.num_tokens, self.kv.prefix_block_tokens)
        if self._rows is not None and rest and request.publishes and request.slot is not None:
            try:
                rows = self._rows.copy_out(request.slot, rest.start, rest.stop)
            except Exception as error:
                logger.warning("the end of a prompt is computed by whoever asked for it: %s", error)
                return
            request.rest = Rest(request.token_ids(rest.start, rest.stop), rows)

    def _fork(self, forward: Forward, forked: list[Request]) -> Forward:
        """Start the other completions of prompts that were computed, and sample them from the same logits.

        Args:
            forked: receives the completions that were started, even if this fails.
        """
        leaders = {row.request: place for place, row in enumerate(forward.rows) if row.request.sampling.n > 1}
        places = [*range(len(forward.rows))]
        for leader, sibling in self.scheduler.fork_siblings(list(leaders)) if leaders else ():
            forked.append(sibling)
            places.append(leaders[leader])
        if not forked:
            return forward
        return replace(forward, rows=[*forward.rows, *map(Row, forked)], logits=forward.logits[places])

    def _settle_drafts(self, plan: StepPlan) -> None:
        """Count the drafts of a step, and cut slots back to the accepted tokens."""
        lengths = {}
        for entry in plan.entries:
            if entry.draft:
                request = entry.request
                right = request.num_computed_tokens
                self.speculation.observe(len(entry.draft), right - entry.end + len(entry.draft))
                if right < entry.end and request.slot is not None:
                    lengths[request.slot] = right
        if lengths:
            self.kv.prepare(lengths)

    def _token_logprobs(self, forward: Forward, tokens: Sequence[int | None]) -> list[dict[int, Logprob] | None]:
        """For each row the log probabilities of its token, where its request asked for them; None for others."""
        found: list[dict[int, Logprob] | None] = [None] * len(tokens)
        asked = [
            (place, row.request, token)
            for place, (row, token) in enumerate(zip(forward.rows, tokens, strict=True))
            if token is not None and row.request.logprobs is not None
        ]
        if asked:
            places, requests, chosen = zip(*asked, strict=True)
            counts = [request.sampling.logprobs or 0 for request in requests]
            logits = forward.logits[list(places)]  # a copy
            structured = [(row, request.grammar) for row, request in enumerate(requests) if request.grammar is not None]
            if structured:
                rows = torch.tensor([row for row, _ in structured], device="cpu")
                exclude(logits, rows, [grammar for _, grammar in structured])
            reports = token_logprobs(logits, chosen, counts, self._decode_token)
            for place, report in zip(places, reports, strict=True):
                found[place] = report
        return found

    def _note_prompt_logprobs(self, forward: Forward) -> list[Request]:
        """Store the log probabilities of prompt tokens, where requests asked for them; returns those that have none."""
        without: dict[Request, None] = {}
        if forward.prompt_rows:
            targets = [request.prompt_token_ids[position + 1] for request, position in forward.prompt_rows]
            counts = [request.sampling.prompt_logprobs or 0 for request, _ in forward.prompt_rows]
            reports = token_logprobs(forward.prompt_logits, targets, counts, self._decode_token)
            for (request, _), target, report in zip(forward.prompt_rows, targets, reports, strict=True):
                assert request.prompt_logprobs is not None
                request.prompt_logprobs.append(report)
                if math.isnan(report[target].logprob):
                    without[request] = None
        return list(without)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        logger.error("a step of %d requests failed", len(requests), exc_info=error)
        error.__traceback__ = None  # its frames would keep the step's tensors alive as long as the outputs
        for request in requests:
            for fallen in self._groups[request.parent_id].falls_with(request):
                self.scheduler.finish(fallen, FinishReason.ERROR, error)
            self._changed.append(request)

    def _collect(self) -> None:
        """Add the outputs of requests that changed, but for those aborted since, to those that no step has returned.

        Drops groups that ended. What an interrupt leaves out comes with the next call.
        """
        for parent_id in dict.fromkeys(request.parent_id for request in self._changed):
            group = self._groups.get(parent_id)
            if group is not None:
                ended = not group.unfinished()
                output = group.output()
                if output is not None:  # no calls, at which an interrupt could come between
                    self._outputs += [output]
                if ended:
                    del self._groups[parent_id]
                    self._count(group)
                group.forget_told()
        self._changed.clear()

    def _count(self, group: RequestGroup) -> None:
        """Note how a group's requests ended."""
        for request in group.requests:
            if request.finish_reason is not None:
                self.figures.ended(request)

    @property
    def group_ids(self) -> list[str]:
        """Names of the prompts whose last output no step has returned, in order of arrival."""
        return list(dict.fromkeys([*(output.request_id for output in self._outputs), *self._groups]))


def _keep_back(forward: Forward) -> None:
    """Requests with a chunk that is not finite keep their prefixes to themselves, as do later tokens, which attend to
    it, and completions that are forked.
    """
    for request, finite in forward.finite.items():
        if not finite:
            request.publishes = False


def _nothing() -> None:
    pass


def _make_kv(config: EngineConfig, loaded: LoadedModel) -> KVBackend:
    spec = KVSpec(
        loaded.shape,
        max_num_seqs=config.max_num_seqs,
        max_model_len=loaded.max_model_len,
        dtype=loaded.model.dtype,
        device=loaded.model.device,
        memory_budget=config.resolved_memory_budget(loaded.model.device),
        block_size=config.block_size,
        guard_rows=loaded.attention.guard_rows,
        # A static batch reserves all tokens of a slot in one step.
        chunk_tokens=None if config.scheduling == "static" else loaded.max_num_batched_tokens,
        kv_options=config.kv_options,
        pool=_pool_share(config, loaded),
    )
    return make_backend(config.kv, spec, kv_cache_dtype=config.kv_cache_dtype)


def _pool_share(config: EngineConfig, loaded: LoadedModel) -> PoolShare | None:
    if config.kv_pool is None:
        return None
    least, most = (0, None) if config.kv_share is None else parse_share(config.kv_share)
    identity = _identity(config, loaded) if config.kv_share_prefixes else None
    return PoolShare(config.kv_pool, least, most, _label(config), identity)


def _identity(config: EngineConfig, loaded: LoadedModel) -> bytes:
    """Of all that keys and values depend on but tokens and salt."""
    if not loaded.is_ours:
        check_hashable(loaded.model)
    start = time.monotonic()
    identity = fingerprint(
        loaded.model,
        shape=loaded.shape,
        attention=loaded.attention.name,
        eager=config.enforce_eager,
        stored=config.kv_cache_dtype,
    )
    logger.info("the weights were hashed in %.1f s", time.monotonic() - start)
    return identity


def _label(config: EngineConfig) -> str:
    """The model's name, for people."""
    return borrower_name(config.model if isinstance(config.model, str) else type(config.model).__name__)


def _make_stored(config: EngineConfig, loaded: LoadedModel, kv: KVBackend) -> StoredPrefixes | None:
    if config.kv_store is None:
        return None
    size = parse_bytes(config.kv_store_size, "kv_store_size")
    store = PrefixStore(config.kv_store, size)
    stored = StoredPrefixes(
        kv,
        store,
        fingerprint=_identity(config, loaded),
        windows=_windows(loaded, kv),
        chunk_tokens=loaded.max_num_batched_tokens,
        label=_label(config),
        device=loaded.model.device,
    )
    logger.info("prefixes are stored in %s: %s of %s", store.path, format_bytes(store.bytes), format_bytes(size))
    return stored


def _make_remote(config: EngineConfig, loaded: LoadedModel, kv: KVBackend) -> RemotePrefills | None:
    if config.role != "decode" or config.kv_pool is None or kv.sharing is None:
        return None
    return RemotePrefills(kv, _make_rows(loaded, kv), kv.sharing, partial(prefillers, config.kv_pool, kv.sharing))


def _make_rows(loaded: LoadedModel, kv: KVBackend) -> Rows:
    return Rows(kv, len(loaded.shape.layers), loaded.model.device)


def _windows(loaded: LoadedModel, kv: KVBackend) -> list[int | None]:
    """Per layer, how many tokens of a request the backend keeps; None for all."""
    return [layer.window if kv.forgets_windows else None for layer in loaded.shape.layers]


def _make_scheduler(
    config: EngineConfig,
    loaded: LoadedModel,
    kv: KVBackend,
    stored: StoredPrefixes | None,
    remote: RemotePrefills | None,
) -> Scheduler:
    limits = {"max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": loaded.max_num_batched_tokens}
    if config.scheduling == "static":
        return StaticScheduler(kv, **limits, max_model_len=loaded.max_model_len)
    swap = SwapSpace(
        kv,
        windows=_windows(loaded, kv),
        token_bytes=kv.token_bytes,
        budget=parse_bytes(config.swap_space, "swap_space"),
        mode=config.preemption_mode,
        device=loaded.model.device,
    )
    proposer = None
    if config.speculative_config is not None:
        proposer = NgramProposer(SpeculativeConfig.from_options(config.speculative_config))
    return Scheduler(
        kv,
        **limits,
        policy=config.scheduling_policy,
        swap=swap,
        prefix_caching=config.enable_prefix_caching and not isinstance(kv, NoPrefixCache),
        stored=stored,
        remote=remote,
        long_prefill=config.long_prefill_token_threshold,
        proposer=proposer,
    )
