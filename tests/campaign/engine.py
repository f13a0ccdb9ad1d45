"""The engine: random requests, and whatever may happen to them, over every backend. What each of them is given is
judged by the model alone (`engine_reference.py`); books are checked between operations, and against /proc in the end.

A world is a function of its seed: `play(seed)` plays it again.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

import vattn
from tests.campaign import books
from tests.campaign.injection import events, interrupted
from tests.campaign.play import Played
from tests.campaign.world import Found

if TYPE_CHECKING:  # they load transformers, which other modes do without
    from tests.campaign.engine_reference import Asked, Form
    from vattn.engine import RequestOutput

_OPERATIONS = 80
_END = 20  # most tokens that follow a beginning that requests have in common
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_INTERRUPTED = (0.03, 0.03, 0.03, 0.2)  # the share of calls, of a world


class Injected(RuntimeError):
    """What a model, or a callback, may raise."""


def scenario(rng: random.Random) -> Played:
    """A world of its own."""
    return play(rng.randrange(1 << 40))


def play(seed: int, operations: int = _OPERATIONS) -> Played:
    """So many operations on an engine, and its end."""
    played = Played(lines=["from tests.campaign import engine", f"print(engine.play({seed}, {operations}).detail)"])
    world = World(seed)
    try:
        _warm_up()
        world.run(operations)
    except Found as found:
        played.kind, played.detail = found.kind, str(found)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        played.kind = f"{type(error).__name__} in {place.name}"
        played.detail = f"{error!r}\n{traceback.format_exc()}"
    if played.kind is not None:
        played.detail += "\n" + "\n".join([f"# {world.options}", *(f"# {line}" for line in world.log)])
    played.calls, played.counts = world.calls, world.counts
    return played


@dataclass
class Ticket:
    """A request on its way.

    Attributes:
        asked: its completions.
        salt: of its prefix.
        kind: what its outputs hold.
        known: tokens and text of each completion so far.
        excuses: what happened that may have failed it: names of errors.
        aborted: it was aborted, or may have been.
    """

    asked: list[Asked]
    salt: str
    kind: Any
    known: list[tuple[list[int], str]]
    excuses: set[str] = field(default_factory=set)
    aborted: bool = False


class World:
    """An engine, its requests, and what is known of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.calls = 0
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.options: dict[str, Any] = {}
        self.live: dict[str, Ticket] = {}
        self.asleep = False
        self._names = iter(range(1 << 30))
        self._seen: dict[str, list[tuple[int, ...]]] = {}  # by salt, all tokens that the prefix cache may know
        self._fault: str | None = None  # of the next forward pass
        # Places for an interrupt in a call, as far as is known.
        self._events = {("constructor", "call"): 500, ("constructor", "check"): 1200}
        self._refusals = 0  # calls of `prepare` that will be refused
        self._tenant: vattn.KVCache | None = None  # takes pages of the engine's pool
        self._squeezed = False
        self._forms: list[Form] = []
        self._interrupts = self.rng.choice(_INTERRUPTED)

    # The engine

    def run(self, operations: int) -> None:
        """Operations, and the end."""
        from tests.campaign import engine_reference
        from vattn.engine.scheduling import scheduler

        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would stay
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        rng = self.rng
        self.reference = engine_reference
        self.family = rng.choice(list(engine_reference.FAMILIES))
        self.model = _models(self.family)
        self._traits = _traits(self.model)
        self.options = self._draw_options()
        self._prefixes = [self._draw_tokens(rng.randint(50, 110)) for _ in range(3)]
        before, headroom = books.read(), scheduler.HEADROOM_TOKENS
        scheduler.HEADROOM_TOKENS = rng.choice([2, 2, 64])
        logger = logging.getLogger("vattn")
        logger.setLevel(logging.CRITICAL)
        try:
            if self._make():
                self._operate(operations)
                self._end()
        finally:
            scheduler.HEADROOM_TOKENS = headroom
            logger.setLevel(logging.NOTSET)  # a server that is forked later logs
        self.llm: Any = None
        gc.collect()
        if left := books.left(before):
            raise Found("something is left behind an engine that was closed", left)
        self._check_model("a closed engine")

    def _make(self) -> bool:
        """Makes the engine, at times after some whose constructors were interrupted."""
        from vattn import LLM

        for _ in range(self.rng.choice((0, 0, 1, 4))):
            self.calls += 1
            try:
                self._interrupted("constructor", lambda: LLM(self.model, **self.options).close())
            except KeyboardInterrupt:
                self.counts["interrupted constructors"] += 1
            except vattn.ConfigError:  # as below
                break
            gc.collect()
            self._check_model("an interrupted constructor")
        self.calls += 1
        try:
            self.llm = LLM(self.model, **self.options)
        except vattn.ConfigError as error:
            self.counts["refused options"] += 1
            if not any(text in str(error) for text in ("memory_budget", "budget", "pages")):
                raise
            return False
        self.counts[f"worlds {self._backend}"] += 1
        self.kv = self.llm.core.kv
        self._prepare = self.kv.prepare
        self.kv.prepare = self._prepare_or_refuse
        self.llm.core.runner.launches = self.rng.random() < 0.5  # as on a GPU: what comes is decided after the model
        self._handles = [
            self.model.get_input_embeddings().register_forward_hook(self._forward),
            self.model.get_output_embeddings().register_forward_hook(self._score),
        ]
        return True

    def _check_model(self, after: str) -> None:
        """The model was given as an object, so it is left as it was."""
        found = _traits(self.model)
        if changed := {name for name in found | self._traits if found.get(name) != self._traits.get(name)}:
            what = "its attention in the model" if changed == {"attention"} else "the model changed"
            raise Found(f"{after} leaves {what}", f"{sorted(changed)[:5]}")

    @property
    def _backend(self) -> str:
        windows = (self.options.get("kv_options") or {}).get("windows")
        return f"{self.options['kv']}{' windows' if windows else ''}"

    def _draw_options(self) -> dict[str, Any]:
        rng = self.rng
        context = self.reference.CONTEXT
        request = context * 256  # bytes of the longest
        seqs = rng.choice([1, 2, 4, 6, 8])
        options: dict[str, Any] = {
            "tokenizer": self.reference.tokenizer(),
            "max_num_seqs": seqs,
            "max_num_batched_tokens": rng.choice([max(seqs, 8), 16, 48, 256]),
            "scheduling_policy": rng.choice(["fcfs", "priority"]),
            "preemption_mode": rng.choice(["swap", "swap", "recompute", "auto"]),
            "swap_space": rng.choice([request // 2, "1MiB"]),
            "enable_prefix_caching": rng.random() < 0.8,
            "enforce_eager": rng.random() < 0.5,
            "seed": rng.randrange(1 << 30),
            "long_prefill_token_threshold": rng.choice([0, 0, 0, 20]),
        }
        if rng.random() < 0.4:
            options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": rng.randint(1, 4),
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        kv = rng.choice(["virtual", "virtual", "virtual", "paged", "paged", "windows", "windows", "static", "dynamic"])
        memory = int(request * rng.choice([1.05, 1.2, 1.5, 2.5, 7]))
        if kv == "virtual":
            page = rng.choice([4096, 8192])
            options["kv_options"] = {
                "page_size": page,
                "layout": rng.choice(["layer", "sliced", "fused"]),
                "overlap": rng.random() < 0.5,
                "deferred_reclamation": rng.random() < 0.7,
                "zero_on_free": rng.random() < 0.3,
                "eager_pages": rng.choice([0, 0, 1]),
                "watermark": rng.choice([0.0, 0.2]),
            }
            memory += 6 * page
        elif kv == "windows":
            options |= {"kv_options": {"windows": True}, "block_size": 32}
            memory += 4 * 32 * 256
        elif kv == "paged":
            options["block_size"] = rng.choice([4, 8, 16])
        elif kv == "static":
            memory = request * rng.randint(1, 4)
        if rng.random() < (0.4 if kv == "virtual" else 0.2):  # it reserves memory, which layers with a window may lose
            options["scheduling"] = "static"
            options["scheduling_policy"] = "fcfs"  # the only one there
            options.pop("speculative_config", None)
            options.pop("long_prefill_token_threshold")
            memory = max(memory, 2 * request)
        if rng.random() < 0.25:
            self._forms = _forms(self.reference)
        return {**options, "kv": "paged" if kv == "windows" else kv, "memory_budget": memory, "max_logprobs": 10}

    def _forward(self, module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
        """A hook: the fault of this forward pass."""
        if self._fault in (None, "nan logits"):
            return None
        fault, self._fault = self._fault, None
        self.counts[f"faults: {fault}"] += 1
        if fault == "nan":
            self._excuse("FloatingPointError")
            return output * math.nan
        if fault == "interrupt":
            self._excuse("VattnError")
            raise KeyboardInterrupt
        self._excuse("Injected")
        raise Injected("a kernel that is broken")

    def _score(self, module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
        """A hook: logits that are not finite, of keys and values that are."""
        if self._fault != "nan logits":
            return None
        self._fault = None
        self.counts["faults: nan logits"] += 1
        self._excuse("FloatingPointError")
        return output * math.nan

    def _prepare_or_refuse(self, lengths: Any, *next_lengths: Any, **options: Any) -> None:
        if self._refusals and next_lengths:
            self._refusals -= 1
            self.counts["faults: refused"] += 1
            self._excuse("OutOfPages")
            raise vattn.OutOfPages("no memory", missing_pages=1, missing_bytes=4096)
        self._prepare(lengths, *next_lengths, **options)

    def _excuse(self, error: str) -> None:
        for ticket in self.live.values():
            ticket.excuses.add(error)

    # Operations

    def _operate(self, operations: int) -> None:
        weights = {
            self._add: 30,
            self._steps: 40,
            self._abort: 6,
            self._sleep: 3,
            self._reset: 2,
            self._squeeze: 3,
            self._break: 4,
            self._misuse: 3,
            self._wait: 1,
            self._generate: 3,
            self._beams: 4,
        }
        if self.rng.random() < 0.5:  # a world of its own kind, in which what is rare meets itself
            weights[self.rng.choice(list(weights))] += 100
        for _ in range(operations):
            (operation,) = self.rng.choices(list(weights), list(weights.values()))
            operation()
            if self.rng.random() < 0.3:
                self._check()

    def _call(self, what: str, function: Callable[[], Any], *, computes: bool = False) -> Any:
        """Makes a call, which may be interrupted.

        Args:
            computes: an interrupt of this call fails running requests.

        Raises:
            KeyboardInterrupt: it was interrupted; the engine has mended its books.
        """
        self.calls += 1
        self.counts[what] += 1
        if self.rng.random() >= self._interrupts:
            self.log.append(what)
            return function()
        try:
            found = self._interrupted(what, function)
            self.log.append(what)
            return found
        except KeyboardInterrupt:
            self.log.append(f"{what} (interrupted)")
            self.counts["interrupts"] += 1
            if computes:
                self._excuse("VattnError")
            self._mend()
            raise

    def _interrupted(self, what: str, function: Callable[[], Any]) -> Any:
        """The call, with an interrupt at a random place: near its end as often as anywhere, if its last one tells."""
        rng = self.rng
        event = rng.choice(["call", "check"])
        known = self._events.get((what, event), 2000)
        nth = rng.choice([rng.randint(1, known), int(known ** rng.random()), known - int(200 ** rng.random())])
        if rng.random() < 0.1:  # a longer call may have more of them
            nth = rng.randint(known, 2 * known)
        try:
            return interrupted(function, event, max(1, nth), rng.choice(["raise", "signal"]))
        finally:
            if (count := events()) < nth or nth > known:
                self._events[what, event] = max(1, count)

    def _mend(self) -> None:
        """What the next call on the engine does: and this one does nothing else."""
        self.llm.abort("nobody")
        self.asleep = self.llm.is_sleeping()
        self.llm.check()

    def _add(self, begin: Sequence[int] = (), more: Mapping[str, Any] = _NOTHING) -> None:
        """A request, whose prompt begins with these tokens, if there are any, and which has these parameters."""
        ticket, arguments = self._draw_request(begin, more)
        name, prompt, params, priority = arguments
        what = f"add {name}: {prompt}, {params}, priority {priority}"
        try:
            self._call("add_request", lambda: self.llm.add_request(name, prompt, params, priority=priority))
        except vattn.engine.InvalidRequest as error:
            if "may grow to" not in str(error):
                raise Found("a request is refused", f"{error}: {what}") from error
            return
        except KeyboardInterrupt:
            if self.rng.random() < 0.5:
                if self.llm.abort(name) is None:
                    return
            else:
                try:
                    self.llm.add_request(name, prompt, params, priority=priority)
                except vattn.engine.InvalidRequest as error:
                    if "is unfinished" not in str(error) and "may grow to" not in str(error):
                        raise
                self._enter(name, ticket)
            return
        finally:
            self.log.append(f"  {what}")
        self._enter(name, ticket)

    def _enter(self, name: str, ticket: Ticket) -> None:
        if self._squeezed:
            ticket.excuses.add("OutOfPages")
        self.live[name] = ticket

    def _steps(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2, 4, 8])):
            if not self._step():
                return

    def _step(self) -> bool:
        """One step; whether there may be another one."""
        if self.asleep:
            try:
                self._call("step", self.llm.step)
            except vattn.engine.EngineAsleep:
                return False
            except KeyboardInterrupt:
                return False
            raise Found("a sleeping engine computes", "")
        try:
            outputs = self._call("step", self.llm.step, computes=True)
        except KeyboardInterrupt:
            self._mend()
            return False
        except Injected:  # from on_step, after the step
            self.log.append("  on_step raised")
            return True
        for output in outputs:
            self._take(output)
        return bool(self.live)

    def _abort(self) -> None:
        name = self.rng.choice([*self.live, "nobody"])
        ticket = self.live.get(name)
        if ticket is not None:
            ticket.aborted = True
        try:
            output = self._call("abort", lambda: self.llm.abort(name))
            happened = False
        except KeyboardInterrupt:
            output = self.llm.abort(name)
            happened = True  # at least it may have
        self.log.append(f"  abort {name}")
        if output is not None:
            self._take(output)
        elif ticket is not None and name not in self.llm.core.group_ids:
            if not happened:
                raise Found("a request is unknown to abort", name)
            del self.live[name]

    def _sleep(self) -> None:
        if self.asleep:
            try:
                if self._call("wake_up", self.llm.wake_up) is not True:
                    raise Found("wake_up leaves the engine asleep", "")
            except KeyboardInterrupt:
                return
            self.asleep = False
            return
        may = self._backend in ("virtual", "paged windows", "dynamic")
        try:
            self._call("sleep", self.llm.sleep)
        except vattn.ConfigError:
            if may:
                raise
            return
        except KeyboardInterrupt:
            return
        if not may:
            raise Found("a backend gives memory back that it keeps", self._backend)
        self.asleep = True
        if not self._squeezed and (held := self.kv.stats().physical_bytes):
            raise Found("a sleeping engine holds memory", f"{held} bytes")

    def _reset(self) -> None:
        running = self.rng.random() < 0.5
        try:
            gone = self._call("reset_prefix_cache", lambda: self.llm.reset_prefix_cache(running))
        except KeyboardInterrupt:
            return
        if gone is False and (running or not self.live):
            raise Found("reset_prefix_cache says that requests run", f"{len(self.live)} are live")

    def _squeeze(self) -> None:
        """Takes memory of the engine's pool, or gives it back; other backends refuse for a while."""
        if self._backend != "virtual":
            self._refusals = self.rng.randint(1, 4)
            self.log.append(f"squeeze: {self._refusals} refusals")
            return
        self.calls += 1
        self.counts["squeeze"] += 1
        if self._tenant is None:
            shared = self.kv.cache._pool
            self.kv.cache._owns_pool = False  # so that `check` does not take the pages of others for lost ones
            pages = shared.total_pages
            config = vattn.KVConfig(
                num_layers=1, num_kv_heads=1, head_dim=shared.page_size // 64, v_head_dim=0, dtype="float64",
                max_batch_size=1, max_context_len=8 * pages, page_size=shared.page_size, overlap=False,
            )  # fmt: skip
            self._tenant = vattn.KVCache(config, pool=shared)
        share = self.rng.choice([0, 0.2, 0.5, 0.9])
        self.log.append(f"squeeze: {share}")
        if share:
            self._excuse("OutOfPages")
        for held in self._tenant.page_map():
            if held.active:
                self._tenant.free_reqid(held.reqid)
        self._tenant.trim()
        self._squeezed = share > 0
        if share:
            try:
                self._tenant.step({self._tenant.alloc_reqid(): int(share * self._tenant.config.max_context_len)})
            except vattn.OutOfPages:
                self.counts["squeezed in vain"] += 1

    def _break(self) -> None:
        kind = self.rng.choice(["raise", "nan", "nan", "nan logits", "nan logits", "interrupt", "refused", "on_step"])
        self.log.append(f"break: {kind}")
        if kind == "refused":
            self._refusals = self.rng.randint(1, 3)
        elif kind == "on_step":
            self.llm.on_step = self._on_step
        else:
            self._fault = kind
        if kind == "nan" and self.rng.random() < 0.7:
            self._fail_a_prefix()

    def _fail_a_prefix(self) -> None:
        """Tokens that nobody has computed, in the step that fails, and again after it: nobody finds what has failed."""
        length, more = self.rng.randint(50, 110), {}
        if self.rng.random() < 0.5:
            # Completions without a token do not fail, as none has to be drawn. They begin in the step that computes the
            # end of the prompt, which is to be the one that fails.
            more = {"max_tokens": 0, "min_tokens": 0, "n": 3, "temperature": 1.0}
            length = min(length, max(20, self.options["max_num_batched_tokens"] - _END))
        begin = self._draw_tokens(length)
        for given in (more, {}):
            self._add(begin, given)
            self._steps()

    def _on_step(self, record: Any) -> None:
        self.llm.on_step = None
        self.counts["faults: on_step"] += 1
        raise Injected("from on_step")

    def _misuse(self) -> None:
        """Calls that must be refused, and change nothing."""
        rng, llm = self.rng, self.llm
        invalid, config = vattn.engine.InvalidRequest, vattn.ConfigError
        params = vattn.SamplingParams(max_tokens=3)
        other = self.reference.VOCAB
        misuses: list[tuple[Callable[[], Any], type[Exception]]] = [
            (lambda: llm.add_request("bad", [], params), invalid),
            (lambda: llm.add_request("bad", [5, other], params), invalid),
            (lambda: llm.add_request("bad", [5] * self.reference.CONTEXT, params), invalid),
            (lambda: llm.add_request("bad", {"prompt": "a", "cache_slat": "b"}, params), invalid),
            (lambda: llm.add_request("bad", {"prompt": "a", "multi_modal_data": {"image": 1}}, params), invalid),
            (lambda: llm.add_request("bad", [5], vattn.SamplingParams(stop_token_ids=[other])), invalid),
            (lambda: llm.add_request("bad", [5], vattn.SamplingParams(logprobs=11)), invalid),
            (lambda: llm.enqueue([[5, 6], []], params), invalid),
            (lambda: llm.sleep(2), config),
            (lambda: llm.wake_up(["kv-cache"]), config),
        ]
        if self.live:
            misuses.append((lambda: llm.generate([5], params, use_tqdm=False), vattn.VattnError))
        if llm.core.has_unfinished() and (taken := next(iter(llm.core._groups), None)) is not None:
            misuses.append((lambda: llm.add_request(taken, [5], params), invalid))
        call, error = rng.choice(misuses)
        try:
            self._call("misuse", call)
        except (error, KeyboardInterrupt):
            return
        raise Found("a call is accepted that must be refused", str(misuses.index((call, error))))

    def _wait(self) -> None:
        """Everything that is queued, to its end."""
        if self.asleep:
            return
        try:
            outputs = self._call(
                "wait_for_completion", lambda: self.llm.wait_for_completion(use_tqdm=False), computes=True
            )
        except KeyboardInterrupt:
            if not self.llm.has_unfinished():  # it may not have begun
                self._dropped()
            return
        except Injected:
            self._dropped()
            return
        for output in outputs:
            if self.live[output.request_id].kind is vattn.engine.RequestOutputKind.DELTA:
                del self.live[output.request_id]  # it has the last news only
            else:
                self._take(output)
        self._idle()

    def _generate(self) -> None:
        if self.live or self.asleep:
            return
        drawn = [self._draw_request() for _ in range(self.rng.randint(1, 6))]
        for ticket, (name, *what) in drawn:
            self._enter(name, ticket)
            self.log.append(f"  generate {name}: {what}")
        prompts = [prompt for _, (_, prompt, _, _) in drawn]
        params = [each for _, (_, _, each, _) in drawn]
        try:
            outputs = self._call("generate", lambda: self.llm.generate(prompts, params, use_tqdm=False), computes=True)
        except vattn.engine.InvalidRequest as error:
            if "may grow to" not in str(error):
                raise Found("a request is refused", str(error)) from error
            self._dropped()
            return
        except (KeyboardInterrupt, Injected):
            self._dropped()
            return
        for output, (_, (name, *_)) in zip(outputs, drawn, strict=True):
            self._take(output, name=name, whole=True)
        self._idle()

    def _dropped(self) -> None:
        self.live.clear()
        self._mend()
        self._idle()

    def _beams(self) -> None:
        if self.live and self.rng.random() < 0.5:
            self._wait()
        if self.live or self.asleep or self.options.get("scheduling") == "static":
            return
        rng = self.rng
        if rng.random() < 0.4:
            self._squeeze()
        width = rng.randint(1, min(4, self.options["max_num_seqs"]))
        prompts = [self._draw_prompt()[0] for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.4:  # so long that there is memory for few beams
            prompts = [self._draw_tokens(rng.randint(self.reference.CONTEXT // 2, self.reference.CONTEXT - 8))]
        params = vattn.engine.BeamSearchParams(
            beam_width=width,
            max_tokens=rng.randint(1, 7),
            ignore_eos=rng.random() < 0.5,
            temperature=rng.choice([0.0, 0.7]),
            length_penalty=rng.choice([0.0, 1.0, 1.0, 2.5]),
        )
        self.log.append(f"  {params}: {prompts}")
        self._seen.setdefault("", []).extend(map(tuple, prompts))
        squeezed, before = self._squeezed or self._refusals, self.counts.total()
        preemptions = self.llm.core.figures.preemptions
        try:
            outputs = self._call("beam_search", lambda: self.llm.beam_search(prompts, params), computes=True)
        except vattn.engine.InvalidRequest as error:
            if "beams of up to" not in str(error):
                raise
            return
        except (KeyboardInterrupt, Injected):
            self._dropped()
            return
        faults = self.counts.total() - before - 1
        self.counts["preempted in beam searches"] += self.llm.core.figures.preemptions - preemptions
        for prompt, output in zip(prompts, outputs, strict=True):
            if output.error is not None:
                if not squeezed and not faults:
                    raise Found("a beam search fails", repr(output.error))
                continue
            longest = self.reference.CONTEXT - len(prompt)
            self._judge_beams(prompt, params, min(params.max_tokens, longest), output)
        self._idle()

    def _judge_beams(self, prompt: list[int], params: Any, most: int, output: Any) -> None:
        found = self.reference.beams(
            self.family, prompt, params.beam_width, most, ignore_eos=params.ignore_eos, penalty=params.length_penalty
        )
        self.counts["beams"] += len(output.sequences)
        scores = {tuple(tokens): (total, score) for tokens, total, score in found}
        if len(output.sequences) != min(params.beam_width, len(found)):
            raise Found("wrong beams", f"{len(output.sequences)} sequences")
        for place, sequence in enumerate(output.sequences):
            total, score = scores.get(tuple(sequence.tokens), (math.inf, math.inf))
            if abs(score - found[place][2]) > 1e-5 or abs(total - sequence.cum_logprob) > 1e-4:
                raise Found("wrong beams", f"{sequence.tokens} in place {place}, where {found[place]} is; {score}")

    # Requests

    def _draw_tokens(self, count: int) -> list[int]:
        special = [self.reference.BOS, self.reference.PAD, self.reference.VOCAB - 1]
        return [self.rng.choice(special) if self.rng.random() < 0.01 else self.rng.randrange(256) for _ in range(count)]

    def _draw_prompt(self) -> tuple[list[int], Any]:
        """A prompt's token ids, and what is given for it."""
        rng = self.rng
        length = min(rng.randint(1, 60), rng.randint(1, 60))
        if rng.random() < 0.2:
            text = "".join(rng.choice("ab c\n") for _ in range(length))
            return list(text.encode()), rng.choice([text, {"prompt": text}])
        tokens = self._draw_tokens(length)
        if rng.random() < 0.5:
            prefix = rng.choice(self._prefixes)
            tokens = prefix[: rng.choice([len(prefix), rng.randint(1, len(prefix))])] + tokens[:20]
        return tokens, rng.choice([tokens, tuple(tokens), {"prompt_token_ids": tokens}])

    def _draw_request(
        self, begin: Sequence[int] = (), more: Mapping[str, Any] = _NOTHING
    ) -> tuple[Ticket, tuple[str, Any, Any, int]]:
        rng, reference = self.rng, self.reference
        tokens, prompt = self._draw_prompt()
        salt = rng.choice(["", "", "one", "two"])
        if begin:
            tokens, salt = [*begin, *tokens[:_END]], ""
            prompt = tokens
        if salt:
            prompt = {**prompt, "cache_salt": salt} if isinstance(prompt, dict) else _salted(prompt, salt)
        form = rng.choice(self._forms) if self._forms and rng.random() < 0.4 else None
        params = {**self._draw_params(form), **more}
        kind = rng.choice(list(vattn.engine.RequestOutputKind))
        given = {**params, "output_kind": kind, **({"structured_outputs": form.wanted} if form else {})}
        longest = min(reference.CONTEXT, len(tokens) + params.get("max_tokens", 16))
        asked = [
            reference.Asked(self.family, tuple(tokens), params, form, params.get("seed", 0) + index, longest)
            for index in range(params.get("n", 1))
        ]
        ticket = Ticket(asked, salt, kind, [([], "") for _ in asked])
        self._seen.setdefault(salt, []).append(tuple(tokens))
        return ticket, (f"r{next(self._names)}", prompt, vattn.SamplingParams(**given), rng.randint(-2, 2))

    def _draw_params(self, form: Form | None) -> dict[str, Any]:
        rng = self.rng
        vocab = self.reference.VOCAB
        params: dict[str, Any] = {"max_tokens": rng.choice([0, 1, 4, 12, 25, 25, rng.randint(30, 150)])}
        params["temperature"] = 0.0
        if rng.random() < 0.5:
            params |= {"temperature": rng.choice([0.3, 1.0, 1.7]), "seed": rng.getrandbits(40)}
            params["n"] = rng.choice([1, 1, 1, 2, 4])
        extras: list[dict[str, Any]] = [
            {"top_k": rng.randint(1, 50)},
            {"top_p": rng.uniform(0.5, 1)},
            {"min_p": rng.uniform(0, 0.2)},
            {"repetition_penalty": rng.uniform(0.8, 1.5)},
            {"frequency_penalty": rng.uniform(0, 1), "presence_penalty": rng.uniform(-1, 1)},
            {"stop": rng.sample(["a", "b", "ab", "0", "\n", "e", "tt", "x"], 3)},
            {"stop": ["c", "d", "f"], "include_stop_str_in_output": True, "min_tokens": params["max_tokens"] // 3},
            {"logprobs": rng.randint(0, 4)},
            {"prompt_logprobs": rng.randint(0, 2)},
            {"ignore_eos": True},
            {"skip_special_tokens": False},
        ]
        if form is None:
            extras += [
                {"logit_bias": {rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(2)}},
                {"stop_token_ids": rng.sample(range(vocab), 6)},
                {"stop_token_ids": rng.sample(range(vocab), 3), "min_tokens": params["max_tokens"] // 2},
                {"bad_words": ["a", rng.choice("abc ") + rng.choice("xyz")]},
                {"allowed_token_ids": rng.sample(range(vocab), 60)},
                {"detokenize": False},
            ]
        for extra in rng.sample(extras, rng.choice([0, 0, 1, 2, 3])):
            params |= extra
        if "stop" in params:
            params.pop("detokenize", None)
        return params

    def _take(self, output: RequestOutput, *, name: str = "", whole: bool = False) -> None:
        """Takes an output, and judges the last one of a request."""
        name = name or output.request_id
        ticket = self.live.get(name)
        if ticket is None:
            raise Found("an output of a request that has ended", name)
        delta = ticket.kind is vattn.engine.RequestOutputKind.DELTA and not whole
        for completion in output.outputs:
            tokens, text = ticket.known[completion.index]
            if delta:
                tokens, text = [*tokens, *completion.token_ids], text + completion.text
            else:
                if completion.token_ids[: len(tokens)] != tokens or not completion.text.startswith(text):
                    raise Found("an output takes back what was told", f"{name}: {completion}")
                tokens, text = list(completion.token_ids), completion.text
            ticket.known[completion.index] = tokens, text
        if not output.finished:
            if ticket.kind is vattn.engine.RequestOutputKind.FINAL_ONLY:
                raise Found("an output before the end", name)
            return
        del self.live[name]
        prompt, others = ticket.asked[0].prompt, list(self._seen[ticket.salt])
        others.remove(prompt)
        most = max((_common(prompt, other) for other in others), default=0)
        if output.num_cached_tokens > most:
            raise Found("more tokens were cached than were known", f"{name}: {output.num_cached_tokens}, {most}")
        if not delta and [each.index for each in output.outputs] != list(range(len(ticket.asked))):
            raise Found("completions are missing", f"{name}: {output}")
        try:
            self._judge(ticket, output, delta)
        except self.reference.Wrong as wrong:
            raise Found("wrong tokens", f"{name}: {wrong}\n{ticket}\n{output}") from wrong

    def _judge(self, ticket: Ticket, output: RequestOutput, delta: bool) -> None:
        reasons = {each.index: each for each in output.outputs if each.finish_reason is not None}
        for index, asked in enumerate(ticket.asked):
            tokens, text = ticket.known[index]
            told = reasons.get(index)
            if told is None and not delta:
                raise Found("a completion has no end", f"{output}")
            reports = told.logprobs if told is not None and not delta else None
            if told is not None and told.finish_reason == "error":
                reports = None  # an interrupt may have come between a token and its report
            after = asked.judge(tokens, reports)
            if told is not None:
                self.counts[f"ended: {told.finish_reason}"] += 1
                self.counts["tokens"] += len(tokens)
                self.counts["ended with a form"] += asked.form is not None
                self._judge_end(ticket, asked, told, tokens, text, after, output)
        scored = ticket.asked[0].params.get("prompt_logprobs")
        if (
            scored is not None
            and all(each.finish_reason in ("stop", "length") for each in output.outputs)
            and not delta
        ):
            if output.prompt_logprobs is None:
                raise Found("no prompt_logprobs", f"{output}")
            self.reference.check_prompt_reports(self.family, output.prompt_token_ids, output.prompt_logprobs, scored)

    def _judge_end(
        self, ticket: Ticket, asked: Asked, told: Any, tokens: list[int], text: str, after: Any, output: RequestOutput
    ) -> None:
        reason, why = told.finish_reason, asked.end(tokens)
        if reason == "abort":
            if not ticket.aborted:
                raise Found("a request is aborted that nobody aborted", f"{output}")
            return
        if reason == "error":
            error = type(output.error).__name__
            none_left = error == "FloatingPointError" and not math.isfinite(after.max())
            if error not in ticket.excuses and not none_left:
                raise Found(f"a request failed without a cause: {error}", f"{output.error!r}, {ticket.excuses}")
            return
        by_eos = tokens[-1:] == [self.reference.EOS] and not asked.params.get("ignore_eos", False)
        stop = {
            "stop token": None if by_eos or not tokens else tokens[-1],
            "stop string": asked.stop_string(tokens),
        }.get(why)
        if (reason, told.stop_reason) != ("length" if why == "length" else "stop" if why else "", stop):
            raise Found("a request ended where it should not", f"{reason}, {told.stop_reason}, not {why}: {output}")
        if asked.params.get("detokenize", True):
            try:
                asked.check_text(tokens, text)
            except self.reference.Wrong as wrong:
                raise Found("wrong text", f"{wrong}: {tokens}, {asked.params}") from wrong
        params = asked.params
        plain_names = {"max_tokens", "temperature", "stop_token_ids", "ignore_eos", "repetition_penalty", "logprobs"}
        if not params["temperature"] and params.keys() <= plain_names and asked.form is None and params["max_tokens"]:
            self.counts["beside generate"] += 1
            if self.reference.generated(self.family, asked.prompt, params, asked.longest) != tokens:
                raise Found("other tokens than transformers' generate", f"{output}")

    # Books

    def _check(self) -> None:
        try:
            self.llm.check()
        except AssertionError as error:
            raise Found("check()", f"{error}\n{traceback.format_exc()}") from error
        if not self.live:
            self._idle()

    def _idle(self) -> None:
        """What must hold while nothing is on its way."""
        if self.llm.has_unfinished():
            raise Found("a request runs that nobody knows of", str(self.llm.core.group_ids))
        self._books()
        stats = self.kv.stats()
        if stats.used_bytes or stats.live_bytes or (not self._squeezed and self.kv.available() != self.kv.total()):
            raise Found("memory is held for nobody", f"{stats}, {self.kv.available()} of {self.kv.total()}")
        swap = self.llm.core.scheduler.swap
        if swap is not None and swap.used_bytes:
            raise Found("copies are held for nobody", f"{swap.used_bytes} bytes")

    def _books(self) -> None:
        try:
            self.llm.check()
        except AssertionError as error:
            raise Found("check()", f"{error}\n{traceback.format_exc()}") from error

    def _end(self) -> None:
        """Lets what is left finish, at times, and closes."""
        swap = self.llm.core.scheduler.swap
        self.counts["preempted"] += self.llm.core.figures.preemptions
        self.counts["swapped in"] += 0 if swap is None else swap.num_loaded
        self.counts["cached tokens"] += self.llm.core.scheduler.hit_tokens
        self.counts["accepted drafts"] += self.llm.speculation.num_accepted_tokens
        self._fault, self._refusals, self.llm.on_step = None, 0, None
        if self._tenant is not None:
            self._tenant.close()
            self.kv.cache._owns_pool, self._squeezed = True, False
        if self.rng.random() < 0.8:
            self.asleep = not self.llm.wake_up()
            most = sum(asked.longest for ticket in self.live.values() for asked in ticket.asked) + 50
            while self.llm.has_unfinished():
                most -= 1
                if most < 0:
                    raise Found("requests do not end", str(self.llm.core.group_ids))
                for output in self._drain():
                    self._take(output)
            if self.live:
                raise Found("a request never ended", str(list(self.live)))
            self._idle()
        for handle in self._handles:
            handle.remove()
        del self.kv.prepare
        with self._closing():
            self._call("close", self.llm.close)
        self.llm.close()
        self.kv = self._prepare = None

    def _drain(self) -> list[RequestOutput]:
        try:
            found: list[RequestOutput] = self._call("step", self.llm.step, computes=True)
        except KeyboardInterrupt:
            return []
        return found

    @contextmanager
    def _closing(self) -> Iterator[None]:
        self._mend, before = lambda: None, self._mend  # type: ignore[method-assign]
        try:
            yield
        except KeyboardInterrupt:
            pass
        finally:
            self._mend = before  # type: ignore[method-assign]


def _forms(reference: Any) -> list[Form]:
    make = reference.Form
    return [
        make({"regex": "[0-9]{3}-[a-c]{1,4}"}, "[0-9]{3}-[a-c]{1,4}"),
        make({"choice": ["yes", "yes, please", "no"]}, "yes|yes, please|no"),
        make({"json": {"enum": [1, 25, "1"]}}, '1|25|"1"'),
        make({"grammar": 'start: "(" /[a-z]{1,9}/ ")"'}, r"\([a-z]{1,9}\)"),
        make({"grammar": 'root ::= one+ ("!" | "?"){1,2}\none ::= "Hi" | [A-C]'}, "(Hi|[A-C])+[!?]{1,2}"),
    ]


def _salted(prompt: Any, salt: str) -> dict[str, Any]:
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


def _common(tokens: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many of the first tokens of both are the same."""
    return next(
        (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
    )


def _traits(model: Any) -> dict[str, Any]:
    """By name, what an engine may change in a model: its attention, what its modules are and have, and its weights."""
    traits: dict[str, Any] = {"attention": model.config._attn_implementation}
    for name, module in model.named_modules():
        traits[f"module {name}"] = type(module), sorted(vars(module))
    for name, weight in model.named_parameters():
        traits[f"weight {name}"] = weight.shape, weight.dtype, weight.double().sum().item()
    return traits


_made: dict[str, Any] = {}


def _models(family: str) -> Any:
    from tests.campaign.engine_reference import make_model

    if family not in _made:
        _made[family] = make_model(family)
    return _made[family]


def _warm_up() -> None:
    """Makes what a process makes once: files of pages, threads, compiled code."""
    if "warm" in _made:
        return
    from tests.campaign.engine_reference import tokenizer
    from vattn import LLM, SamplingParams

    for page in (4096, 8192):
        options = {"kv": "virtual", "kv_options": {"page_size": page}}
        with LLM(_models("full"), tokenizer=tokenizer(), memory_budget="1MiB", **options) as llm:
            llm.generate([5, 6], SamplingParams(max_tokens=2, structured_outputs={"regex": "[ab]"}), use_tqdm=False)
    _made["warm"] = True
