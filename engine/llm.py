"""The engine: a model, a cache, a scheduler, and the loop that drives them.

    with LLM("path/or/hub-id", kv="virtual", max_model_len=4096) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

`generate` and `chat` run lists of prompts to their ends. `add_request`, `step` and `abort` drive the same loop one
iteration at a time, with requests that come and go.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from vattn import packed
from vattn.attention import Attention, Case
from vattn.attention import get as get_attention
from vattn.config import budget_bytes
from vattn.engine.beam_search import BeamSearchOutput, BeamSearchParams, make_beams, take_beams
from vattn.engine.checks import LARGEST, checked_whole, number, whole
from vattn.engine.exclusive import EngineBusy, EngineClosed, Gate, Use, exclusive
from vattn.engine.kv.base import KVStats
from vattn.engine.kv.make import make_backend
from vattn.engine.kv.virtual import VirtualKV
from vattn.engine.model import optimize
from vattn.engine.model.runner import Forward, ModelRunner
from vattn.engine.model.sampler import Sampler
from vattn.engine.requests.detokenizer import Detokenizer
from vattn.engine.requests.logprobs import Logprob, token_logprobs
from vattn.engine.requests.outputs import RequestGroup, RequestOutput
from vattn.engine.requests.prompts import Conversation, Prompt, PromptReader, as_conversations, as_prompts, cache_salt
from vattn.engine.requests.request import FinishReason, InvalidRequest, Request, State
from vattn.engine.requests.sampling import RequestOutputKind, SamplingParams
from vattn.engine.scheduling.drafts import NgramProposer, SpeculationStats, SpeculativeConfig
from vattn.engine.scheduling.scheduler import SCHEDULING, Entry, Plan, Policy, Scheduler, check_limits
from vattn.engine.scheduling.static import StaticScheduler
from vattn.engine.scheduling.swap import PreemptionMode, SwapSpace
from vattn.errors import ConfigError, OutOfPages, VattnError
from vattn.integers import shown
from vattn.quantised import KVCacheDtype
from vattn.units import parse_bytes

logger = logging.getLogger(__name__)

# What of an LLM's books a call changes, or what of a step is under way.
_QUEUES, _STEP, _ON_STEP = "queues", "step", "on_step"

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class StepRecord:
    """One step, for benchmarks and plots. Times in seconds.

    Attributes:
        start_time: `time.monotonic()` when the step began.
        schedule_seconds: planning.
        prepare_seconds: making memory ready: the backend's `prepare`.
        forward_seconds: model and sampling.
        decode_tokens, prefill_tokens: tokens computed for requests that have output, and for those that do not.
        num_running, num_waiting: requests after the step.
        num_preempted: requests that lost their cache in this step.
        drafted_tokens, accepted_tokens: of `decode_tokens` those of drafts, and of these the ones that were right.
        kv: the backend's figures after the step.
    """

    start_time: float
    schedule_seconds: float
    prepare_seconds: float
    forward_seconds: float
    decode_tokens: int
    prefill_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    kv: KVStats
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.schedule_seconds + self.prepare_seconds + self.forward_seconds


class LLM:
    """A language model that serves many requests at once.

    Args:
        model: path, hub id, or a loaded causal language model, which is put in eval mode and whose attention
            implementation is `"vattn"` until `close`.
        kv: where keys and values live: `"virtual"`, `"paged"`, `"static"` or `"dynamic"`.
        scheduling: `"continuous"`: every step is planned anew; `"static"`: a batch runs until its slowest request
            ends, to compare with.
        tokenizer: path, hub id or tokenizer; the model's own by default, none for a loaded model.
        skip_tokenizer_init: no tokenizer: prompts are token ids, and outputs have no text.
        trust_remote_code: run the Python that a checkpoint brings along, where it does; refused by default.
        dtype: of weights and cache; `"auto"` takes the checkpoint's.
        max_num_seqs: most requests that run at a time.
        max_num_batched_tokens: most tokens of one step; longer prompts are computed in chunks.
        max_model_len: most tokens of a request, prompt and output; the model's own limit by default.
        memory_budget: of the cache: bytes, text such as "4GiB" (the default), or "auto": a share of the memory that is
            free when the model is loaded, see `vattn.KVConfig`.
        gpu_memory_utilization: that share, over 0 and up to 1, in place of `memory_budget`; of the machine's memory
            where the device is a CPU.
        block_size: tokens per block, for `paged`.
        kv_cache_dtype: of the cache: "auto", the model's, or "int8": 8 bits with a scale per token and head, for
            `virtual`; with kernels that read request by request.
        kv_options: further options of `vattn.KVConfig`, for `virtual`.
        enable_prefix_caching: requests find what earlier ones with the same start (and the same `cache_salt`) have
            computed; with `virtual` and `paged`. Cached blocks give way as soon as memory is needed.
        scheduling_policy: who runs first and is preempted last: "fcfs", by arrival, or "priority", by the priorities
            that requests bring.
        preemption_mode: what becomes of the cache of a preempted request: "recompute", "swap" (copied to the machine's
            memory, and back), or "auto": what is estimated cheaper.
        swap_space: most memory for such copies: bytes or text; taken only when it is used.
        attention: kernel: a name of `vattn.attention.names()`, "auto" for the best one here, or an adapter.
        enforce_eager: run the model as transformers wrote it: without CUDA graphs of decode steps, without the packed
            weights and fused products of `vattn.engine.model.optimize`, with keys and values of all heads in the cache
            where others store latents (`vattn.packed.latents`).
        speculative_config: decode several tokens in a step where text repeats itself: `{"method": "ngram",
            "num_speculative_tokens": 4}`, and what else `SpeculativeConfig` has (`vattn.engine.scheduling.drafts`).
            The same tokens come out, but where the order of a sum decides between two; None to decode plainly.
        seed: of requests that bring none; None to draw one.
        on_step: called with a `StepRecord` after each step. May be set later.

    One thread at a time may use it; a second one is told so by `EngineBusy` at once. `close` may be called by any.

    Attributes:
        token_bytes: what one token takes in the cache, in all layers.
        speculation: what came of drafts so far.

    Raises:
        ConfigError: an argument that is unknown, contradictory or impossible; `UnsupportedModel` is one.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        kv: str = "virtual",
        scheduling: str = "continuous",
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        dtype: str | torch.dtype = "auto",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        memory_budget: int | str | None = None,
        gpu_memory_utilization: float | None = None,
        block_size: int = 16,
        kv_cache_dtype: KVCacheDtype = "auto",
        kv_options: Mapping[str, Any] | None = None,
        enable_prefix_caching: bool = True,
        scheduling_policy: Policy = "fcfs",
        preemption_mode: PreemptionMode = "auto",
        swap_space: int | str = "1GiB",
        attention: str | Attention = "auto",
        enforce_eager: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        seed: int | None = 0,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        max_num_seqs, max_num_batched_tokens = check_limits(max_num_seqs, max_num_batched_tokens)
        block_size = checked_whole("block_size", block_size, 1)
        if on_step is not None and not callable(on_step):
            raise ConfigError(f"on_step is {shown(on_step)}; give a function of a StepRecord, or None")
        if seed is not None and whole(seed) is None:
            raise ConfigError(f"seed is {shown(seed)}; give a whole number, or None")
        if kv_options is not None and not (
            isinstance(kv_options, Mapping) and all(isinstance(k, str) for k in kv_options)
        ):
            raise ConfigError(f"kv_options is {shown(kv_options)}; give a mapping of options of KVConfig")
        for name, value in (
            ("skip_tokenizer_init", skip_tokenizer_init),
            ("trust_remote_code", trust_remote_code),
            ("enable_prefix_caching", enable_prefix_caching),
            ("enforce_eager", enforce_eager),
        ):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {shown(value)}; give True or False")
        if not isinstance(attention, str) and not hasattr(attention, "refusal"):
            raise ConfigError(f"attention is {shown(attention)}; give the name of a kernel, or an adapter")
        if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike) and not hasattr(tokenizer, "decode"):
            raise ConfigError(f"tokenizer is {shown(tokenizer)}; give a path, a hub id or a tokenizer")
        _check_memory(memory_budget, gpu_memory_utilization)
        if scheduling not in SCHEDULING:
            raise ConfigError(f"scheduling={shown(scheduling)} is not known; choose one of {', '.join(SCHEDULING)}")
        proposer = None
        if speculative_config is not None:
            proposer = NgramProposer(SpeculativeConfig.from_options(speculative_config))
            if scheduling != "continuous":
                raise ConfigError(f"speculative_config needs scheduling='continuous', not {scheduling!r}")
        self.speculation = SpeculationStats()
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        if isinstance(tokenizer, os.PathLike):
            tokenizer = os.fspath(tokenizer)
        self.model = _load_model(model, dtype, trust_remote_code)
        self.tokenizer = None if skip_tokenizer_init else _load_tokenizer(model, tokenizer, trust_remote_code)
        packed.check_supported(self.model)
        self.max_model_len = _max_model_len(self.model, max_model_len)
        embedding: Any = self.model.get_input_embeddings()
        self.vocab_size: int = embedding.num_embeddings
        self.prompts = PromptReader(self.tokenizer, self.vocab_size, self.max_model_len)
        self.on_step = on_step
        self._on_closing: Callable[[], None] = _nothing
        self._eos_token_ids = _eos_token_ids(self.model, self.tokenizer) & frozenset(range(self.vocab_size))
        self._eos_token_id = _eos_token_id(self.tokenizer, self._eos_token_ids)
        self._seeds = random.Random(None if seed is None else whole(seed))
        self._names = itertools.count()
        self._groups: dict[str, RequestGroup] = {}
        self._sampler = Sampler()
        self._decode_token = functools.lru_cache(maxsize=65536)(self._decode_one)
        self._gate = Gate()
        self._closed = False
        self._phase = ""  # what of a step is under way
        self._torn = ""  # which change of the books is under way, or was interrupted
        self._changed: list[Request] = []  # requests whose news have not been told
        self._restore_model: Callable[[], None] = lambda: None

        if self.model.device.type == "cpu":
            optimize.keep_freed_memory()
        packed.register()
        self._previous_attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(packed.NAME)
        try:
            shape = packed.kv_shape(self.model)
            latents = {} if enforce_eager else packed.find_latents(self.model, shape)
            shape = packed.store_latents(shape, latents)
            cases = [
                Case(
                    self.model.device,
                    self.model.dtype,
                    head_dim,
                    v_head_dim,
                    block_size if kv == "paged" else None,
                    shape.softcap,
                    shape.sinks,
                    whole_layers=kv != "dynamic" and kv_cache_dtype == "auto",
                )
                for head_dim, v_head_dim in shape.head_dims
            ]
            kernel = get_attention(attention, *cases)
            self.kv = make_backend(
                kv,
                shape,
                dtype=self.model.dtype,
                device=self.model.device,
                max_num_seqs=max_num_seqs,
                max_model_len=self.max_model_len,
                memory_budget=_cache_budget(memory_budget, gpu_memory_utilization, self.model.device),
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                guard_rows=kernel.guard_rows,
                chunk_tokens=max_num_batched_tokens,
                kv_options=dict(kv_options or {}),
            )
            self.token_bytes = (
                self.kv.cache.layout.bytes_per_token
                if isinstance(self.kv, VirtualKV)
                else shape.token_elements * self.model.dtype.itemsize
            )
            self._swap = SwapSpace(
                self.kv,
                windows=[layer.window if kv == "virtual" else None for layer in shape.layers],
                token_bytes=self.token_bytes,
                budget=parse_bytes(swap_space, "swap_space"),
                mode=preemption_mode,
                device=self.model.device,
            )
            limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
            self.scheduler = (
                Scheduler(
                    self.kv,
                    **limits,
                    policy=scheduling_policy,
                    swap=self._swap,
                    prefix_caching=enable_prefix_caching,
                    proposer=proposer,
                )
                if scheduling == "continuous"
                else StaticScheduler(self.kv, **limits, max_model_len=self.max_model_len)
            )
            if not enforce_eager and optimize.supported(self.model):
                restore = optimize.optimize(self.model, keep_weights=model is self.model)
                if model is self.model:
                    self._restore_model = restore
        except BaseException:
            self.model.set_attn_implementation(self._previous_attention)
            raise
        graphs_up_to = None if enforce_eager else max_num_seqs
        self.runner = ModelRunner(self.model, self.kv, kernel, latents=latents, graphs_up_to=graphs_up_to)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, give the cache back and restore the model's attention. Again is harmless.

        A step that another thread is in is waited for; that thread's `generate` then raises `EngineClosed`. Called from
        `on_step`, it takes effect when the call that makes the steps ends, which is as soon as this one has ended.
        """
        self._gate.closing = True
        self._on_closing()
        use = Use(threading.current_thread(), "close")
        try:
            if self._gate.wait(use):
                self._tear_down()
        finally:
            if self._gate.user is use:
                self._gate.user = None

    def _tear_down(self) -> None:
        if self._closed:
            return
        self._groups.clear()
        self._changed.clear()
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self.runner.close()
        self.kv.close()
        self._restore_model()
        self.model.set_attn_implementation(self._previous_attention)
        self._closed = True

    @property
    def closing(self) -> bool:
        """Whether it is closed, or `close` waits for a step."""
        return self._gate.closing

    def lend(self, thread: threading.Thread, name: str, on_closing: Callable[[], None]) -> None:
        """Let only this thread use it from here on, which may not have begun, until `take_back`.

        Args:
            name: whose thread it is, for those that are refused.
            on_closing: called when `close` is, by its thread.

        Raises:
            EngineBusy: another thread uses it.
            EngineClosed: it is closed.
        """
        self._gate.enter(Use(thread, name, lent=True))
        self._on_closing = on_closing
        if self._gate.closing:
            self.take_back(thread)
            raise EngineClosed("this LLM is closed; make a new one")

    def take_back(self, thread: threading.Thread) -> None:
        """The end of `lend`; nothing, where it was not lent to this thread."""
        user = self._gate.user
        if user is not None and user.thread is thread:
            self._on_closing = _nothing
            self._gate.user = None
            if self._gate.closing:
                self.close()

    @exclusive
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their ends.

        Args:
            prompts: one or many: text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, which may have
                a `"cache_salt"`: text; prompts of different ones share nothing in the prefix cache.
            sampling_params: for all, or one for each; the default ones for None. `output_kind` has no say here.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output per prompt, in their order. A request that failed has finish reason "error", and says why.

        Raises:
            InvalidRequest: a prompt that can never run, or parameters of another type; none of the prompts was started.
            VattnError: requests from `add_request` are unfinished, whose outputs would be lost.
            EngineBusy: another thread uses this LLM.
            EngineClosed: it is closed, or was while this ran.
        """
        self._check_idle("generate")
        listed = as_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        elif isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str | bytes):
            params = [as_params(param) for param in sampling_params]
        else:
            params = [as_params(sampling_params)]
        if len(params) != len(listed):
            raise ConfigError(
                f"{len(listed)} prompts with {len(params)} sampling parameters; give one, or one for each"
            )

        groups = [
            self.make_group(self._new_id(), prompt, param, kind=RequestOutputKind.FINAL_ONLY)
            for prompt, param in zip(listed, params, strict=True)
        ]
        finished: dict[str, RequestOutput] = {}
        with _progress_bar(len(groups), use_tqdm) as bar:
            try:
                for group in groups:
                    self.add_group(group)
                while self.has_unfinished():
                    for output in self.step():
                        finished[output.request_id] = output
                        bar.update()
            except BaseException as error:
                self._abandon(error)
                raise
        return [finished[group.request_id] for group in groups]

    @exclusive
    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of prompts.

        A prompt is computed once; a beam that goes on in several ways is forked, and one that does not is freed.

        Args:
            prompts: as for `generate`.

        Returns:
            One output per prompt, in their order. One that failed has no sequences, and says why.

        Raises:
            InvalidRequest: a prompt that can never run, or more beams than can run together; nothing was started.
            VattnError: requests from `add_request` are unfinished, whose outputs would be lost.
            ConfigError: the engine was made with `scheduling="static"`.
            EngineBusy, EngineClosed: as for `generate`.
        """
        self._check_idle("beam_search")
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params is {shown(params)}; give BeamSearchParams")
        if isinstance(self.scheduler, StaticScheduler):
            raise ConfigError("beam search needs scheduling='continuous': beams come and go in every step")
        groups = []
        for prompt in as_prompts(prompts):
            text, token_ids = self.prompts.read(prompt)
            groups.append(
                make_beams(
                    self._new_id(),
                    text,
                    token_ids,
                    params,
                    kv=self.kv,
                    max_num_seqs=self.scheduler.max_num_seqs,
                    max_model_len=self.max_model_len,
                    cache_salt=cache_salt(prompt),
                    eos_token_ids=self._eos_token_ids,
                )
            )
        queue = list(reversed(groups))
        try:
            while queue or self.has_unfinished():
                while queue and (len(self._groups) + 1) * params.beam_width <= self.scheduler.max_num_seqs:
                    self.add_group(queue.pop())
                self.step()
        except BaseException as error:
            self._abandon(error)
            raise
        decode = None if self.tokenizer is None else functools.partial(self._decode, skip_special_tokens=False)
        return [group.result(decode) for group in groups]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations: `generate` on the prompts that the tokenizer's chat template makes of them.

        Args:
            messages: one conversation or many: `[{"role": "user", "content": "Hello"}, ...]`.
            sampling_params, use_tqdm: as for `generate`.
            template_options: see `PromptReader.apply_chat_template`.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or the template refuses the messages.
        """
        prompts = [
            self.prompts.apply_chat_template(conversation, **template_options)
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Queue a request under a name of the caller's, which no unfinished request may have.

        Its outputs are cumulative unless `output_kind` says otherwise.

        Args:
            priority: lower runs earlier; for `scheduling_policy="priority"`.

        Raises:
            InvalidRequest: the prompt is empty, too long, not in the vocabulary, or would never fit the cache.
            EngineBusy, EngineClosed: as for `generate`.
        """
        params = SamplingParams() if sampling_params is None else as_params(sampling_params)
        self.add_group(
            self.make_group(
                request_id,
                prompt,
                params,
                kind=params.output_kind or RequestOutputKind.CUMULATIVE,
                priority=priority,
            )
        )

    def make_group(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, kind: RequestOutputKind, priority: int = 0
    ) -> RequestGroup:
        """Check a prompt and build its requests, which `add_group` then queues. Any thread may do this.

        Raises:
            InvalidRequest: says what is wrong, with the prompt or with token ids in `sampling`.
        """
        if self._gate.closing:
            raise EngineClosed("this LLM is closed; make a new one")
        sampling = as_params(sampling)
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id is {shown(request_id)}; give text")
        rank = whole(priority)
        if rank is None or not -LARGEST <= rank <= LARGEST:
            raise InvalidRequest(f"priority is {shown(priority)}; give a whole number of 64 bits")
        text, token_ids = self.prompts.read(prompt)
        salt = cache_salt(prompt)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.prompts.check_token_ids(name, tuple(getattr(sampling, name) or ()))
        stop, bad_words = tuple(sampling.stop or ()), tuple(sampling.bad_words or ())
        if self.tokenizer is None and (stop or bad_words):
            name = "stop" if stop else "bad_words"
            raise InvalidRequest(f"{name} is text, but this LLM has no tokenizer; pass tokenizer=...")
        longest = self.max_model_len
        if sampling.max_tokens is not None:
            longest = min(longest, len(token_ids) + sampling.max_tokens)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        bad_words_ids = self.prompts.words_ids(bad_words)
        requests = [
            Request(
                request_id if sampling.n == 1 else f"{index}_{request_id}",
                token_ids,
                sampling,
                max_total_tokens=longest,
                seed=seed + index,
                priority=rank,
                cache_salt=salt,
                eos_token_ids=self._eos_token_ids,
                eos_token_id=self._eos_token_id,
                prompt=text,
                detokenizer=self._detokenizer(sampling),
                bad_words_ids=bad_words_ids,
                parent_id=request_id,
                index=index,
            )
            for index in range(sampling.n)
        ]
        self.scheduler.check_fits(requests[0])
        return RequestGroup(request_id, requests, kind)

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
                f"a request {group.request_id!r} is unfinished; choose another name, or abort it first"
            )
        self.scheduler.check_fits(group.requests[0])
        with self._mending(_QUEUES):
            for request in group.requests:
                self.scheduler.add(request)
            self._groups[group.request_id] = group

    @exclusive
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, all of its completions, and free its memory.

        Returns:
            What it had; None for a request that is unknown or finished.

        Raises:
            EngineBusy: another thread uses this LLM.
        """
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
        return group.output()

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    @exclusive
    def step(self) -> list[RequestOutput]:
        """One iteration: plan, prepare memory, run the model once, sample.

        An exception of `on_step` is raised here, and the step counts: its outputs come with the next one's.

        Returns:
            The requests that got a token or ended, each once, as its `output_kind` has it. One that failed ended with
            finish reason "error"; an exception in the model fails the requests of that step, and the others go on. So
            does an interrupt, which is raised, and fails all requests that ran.

        Raises:
            EngineBusy, EngineClosed: as for `generate`.
        """
        self._check_usable("step")
        if self._phase:
            raise EngineBusy("step() was called from on_step; the next step begins when this one has ended")
        start = time.monotonic()
        accepted_before = self.speculation.num_accepted_tokens
        try:
            with self._mending(_STEP):
                self._phase = _STEP
                plan, num_preempted, prepare_seconds = self._plan(self._changed)
                planned = time.monotonic()
                decode_tokens = plan.num_decode_tokens
                if plan.entries:
                    self._compute(plan, self._changed)
                if 2 * decode_tokens < plan.num_tokens:
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
        return self._outputs()

    def check(self) -> None:
        """Assert that cache and queues agree: every slot in use is a running request's. For tests and idle moments."""
        self.kv.check()
        self.scheduler.check()
        unfinished = sum(len(group.unfinished()) for group in self._groups.values())
        assert unfinished == len(self.scheduler.running) + len(self.scheduler.waiting)

    @contextmanager
    def _mending(self, what: str) -> Iterator[None]:
        """Changes of the books: where one is interrupted, or fails unforeseen, they are put in order again."""
        self._torn = what
        try:
            yield
        except BaseException as error:
            self._mend(error)
            raise
        self._torn = ""

    def _mend(self, error: BaseException) -> None:
        """Put the books in order after a call that ended anywhere; interrupted itself, the next call does it.

        What `_groups` says is true. A step may have left any request that ran half changed, so these fail. Otherwise
        only queues and slots were about to change, and who owns them can be told.
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
        self._sampler = Sampler()
        self.scheduler.restore(running, [request for request in waiting if request not in fallen])
        self._torn = ""

    def _abandon(self, error: BaseException) -> None:
        """Forget all requests: those of the call that is about to raise `error`."""
        self._torn = _STEP
        self._groups.clear()
        self._changed.clear()
        self._mend(error)

    def _check_usable(self, name: str, *, closing: bool = True) -> None:
        if closing and self._gate.closing:
            raise EngineClosed("this LLM is closed; make a new one")
        if self._phase == _STEP:
            raise EngineBusy(
                f"{name}() was called in the middle of a step, by a signal handler or the model; wait for it"
            )
        if self._torn:
            self._mend(KeyboardInterrupt())

    def _check_idle(self, name: str) -> None:
        self._check_usable(name)
        if self.has_unfinished():
            raise VattnError(
                f"{name}() was called with {len(self._groups)} unfinished requests; finish or abort them first, or "
                "use add_request() and step()"
            )

    def _plan(self, changed: list[Request]) -> tuple[Plan, int, float]:
        """A plan that the backend is prepared for, how many requests it preempted, and the seconds of `prepare`.

        The scheduler accounts for memory, so a refusal is rare: guard rows, limits of the driver. Then the youngest
        request gives its cache up; a request that is refused alone fails, and is added to `changed`.
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
                self.kv.prepare(plan.lengths, plan.next_lengths)
                for entry in plan.entries:
                    if entry.request.saved is not None:
                        self._swap.load(entry.request)
                return plan, preempted, seconds + time.monotonic() - start
            except OutOfPages as error:
                refused = True
                if len(self.scheduler.running) > 1:
                    self.scheduler.preempt_last()
                    preempted += 1
                else:
                    self._fail(plan.requests, error, changed)
            except VattnError as error:
                self._fail(plan.requests, error, changed)
            seconds += time.monotonic() - start

    def _compute(self, plan: Plan, changed: list[Request]) -> None:
        """Run a prepared plan; requests that got a token or failed are added to `changed`."""
        forked: list[Request] = []
        try:
            forward = self._fork(self.runner.run(plan.entries), forked)
            forward, beams = take_beams(forward, self._groups)
            tokens = self._sampler.sample(forward.logits, forward.sampled, forward.ahead)
            reports = self._token_logprobs(forward, tokens)
            self._note_prompt_logprobs(forward)
        except Exception as error:
            self._fail([*plan.requests, *forked], error, changed)
            return
        drafts: dict[Request, tuple[int, ...]] = {}
        for entry in plan.entries:
            entry.request.advance(entry.end - len(entry.draft))
            if entry.draft:
                drafts[entry.request] = entry.draft
            elif len(entry) > 1:
                self._publish(entry, forward)
        for request, ahead, token, report in zip(forward.sampled, forward.ahead, tokens, reports, strict=True):
            if request.finish_reason is not None or request.num_uncomputed_tokens:
                continue  # the token of a draft that this one was to follow was wrong, or ended the request
            if request.num_tokens == request.max_total_tokens:  # max_tokens=0: only the prompt was to be computed
                self.scheduler.finish(request, FinishReason.LENGTH)
                continue
            if token is None:
                reason = "no token can be taken from the logits: they are not finite, or every token is excluded"
                self.scheduler.finish(request, FinishReason.ERROR, FloatingPointError(reason))
                continue
            if report is not None and request.logprobs is not None:
                request.logprobs.append(report)
                request.cumulative_logprob += report[token].logprob
            try:
                request.append(token)
            except Exception as error:  # the tokenizer, which is not ours, cannot decode it
                self.scheduler.finish(request, FinishReason.ERROR, error)
                continue
            if request.state is State.DONE:
                self.scheduler.release(request)
            elif drafts.get(request, ())[ahead : ahead + 1] == (token,):
                request.advance(request.num_tokens)
        self._take_back(plan)
        changed += forward.sampled
        for group, requests, logits in beams:
            changed += requests
            try:
                group.advance(requests, logits, self.scheduler)
            except Exception as error:
                self._fail(requests, error, changed)

    def _publish(self, entry: Entry, forward: Forward) -> None:
        """Let others find a chunk of a prompt, if what the model made of it is finite."""
        request = entry.request
        finite = forward.finite.get(request)
        if finite is False:
            request.publishes = False  # nor what comes after it, which has seen it
        elif finite:
            self.scheduler.publish(request)

    def _fork(self, forward: Forward, forked: list[Request]) -> Forward:
        """Start the other completions of prompts that were computed; they are sampled from the same logits.

        Args:
            forked: gets those that were started, whatever happens.
        """
        leaders = {request: row for row, request in enumerate(forward.sampled) if request.sampling.n > 1}
        pairs = self.scheduler.fork_siblings(list(leaders)) if leaders else []
        if not pairs:
            return forward
        forked += [sibling for _, sibling in pairs]
        rows = [*range(len(forward.sampled)), *(leaders[leader] for leader, _ in pairs)]
        return replace(
            forward,
            sampled=[*forward.sampled, *forked],
            ahead=[*forward.ahead, *(0 for _ in forked)],
            logits=forward.logits[rows],
        )

    def _take_back(self, plan: Plan) -> None:
        """Count the drafts of a step, and lower the lengths of slots to what was right."""
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
        """The log probabilities that are asked for, of tokens that requests may be about to get; None for others."""
        found: list[dict[int, Logprob] | None] = [None] * len(tokens)
        asked = [
            (row, request, token)
            for row, (request, token) in enumerate(zip(forward.sampled, tokens, strict=True))
            if token is not None and request.logprobs is not None
        ]
        if asked:
            rows, requests, chosen = zip(*asked, strict=True)
            counts = [request.sampling.logprobs or 0 for request in requests]
            reports = token_logprobs(forward.logits[list(rows)], chosen, counts, self._decode_token)
            for row, report in zip(rows, reports, strict=True):
                found[row] = report
        return found

    def _note_prompt_logprobs(self, forward: Forward) -> None:
        """Add the log probabilities that are asked for of prompts."""
        if forward.scored:
            targets = [request.prompt_token_ids[position + 1] for request, position in forward.scored]
            counts = [request.sampling.prompt_logprobs or 0 for request, _ in forward.scored]
            reports = token_logprobs(forward.prompt_logits, targets, counts, self._decode_token)
            for (request, _), report in zip(forward.scored, reports, strict=True):
                assert request.prompt_logprobs is not None
                request.prompt_logprobs.append(report)

    def _fail(self, requests: Sequence[Request], error: Exception, changed: list[Request]) -> None:
        logger.error("a step of %d requests failed", len(requests), exc_info=error)
        error.__traceback__ = None  # its frames would keep the step's tensors alive as long as the outputs
        for request in requests:
            for fallen in self._groups[request.parent_id].falls_with(request):
                self.scheduler.finish(fallen, FinishReason.ERROR, error)
            changed.append(request)

    def _outputs(self) -> list[RequestOutput]:
        """What to tell of requests that changed; groups that ended are forgotten, and some may have been aborted."""
        changed = dict.fromkeys(request.parent_id for request in self._changed)
        groups = [group for parent_id in changed if (group := self._groups.get(parent_id)) is not None]
        outputs = [output for group in groups if (output := group.output()) is not None]
        for group in groups:
            if not group.unfinished():
                del self._groups[group.request_id]
        self._changed.clear()
        return outputs

    def _new_id(self) -> str:
        return next(name for name in map(str, self._names) if name not in self._groups)

    def _detokenizer(self, sampling: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not sampling.detokenize:
            return None
        decode = functools.partial(self._decode, skip_special_tokens=sampling.skip_special_tokens)
        return Detokenizer(decode, tuple(sampling.stop or ()), include_stop=sampling.include_stop_str_in_output)

    def _decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert self.tokenizer is not None
        # Cleaning up would take spaces away that the model wrote, and other ones as the text grows.
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def _decode_one(self, token_id: int) -> str | None:
        if self.tokenizer is None or token_id >= len(self.tokenizer):
            return None
        return self._decode([token_id], skip_special_tokens=False)


def _nothing() -> None:
    pass


def _progress_bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, desc="Processed prompts", unit="req", disable=not shown, dynamic_ncols=True)


def _check_memory(memory_budget: int | str | None, utilization: float | None) -> None:
    if utilization is None:
        return
    if memory_budget is not None:
        raise ConfigError(
            f"memory_budget={shown(memory_budget)} and gpu_memory_utilization={shown(utilization)} both size the "
            "cache; give one"
        )
    share = number(utilization)
    if share is None or not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization is {shown(utilization)}; give a share over 0 and up to 1")


def _cache_budget(memory_budget: int | str | None, utilization: float | None, device: torch.device) -> int | str:
    if utilization is not None:
        return budget_bytes("auto", device, utilization)
    return "4GiB" if memory_budget is None else memory_budget


@contextmanager
def _loading(what: str, path: str) -> Iterator[None]:
    """Transformers' errors of many types, about files that are missing or cannot be read, as one."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ConfigError(f"the {what} {path!r} cannot be loaded: {error}") from error


def _load_model(
    model: str | PreTrainedModel, dtype: str | torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    if not isinstance(dtype, str | torch.dtype):
        raise ConfigError(f"dtype is {shown(dtype)}; give auto, {', '.join(_DTYPES)}, or a torch.dtype")
    if not isinstance(model, str | torch.nn.Module):
        raise ConfigError(f"model is {shown(model)}; give a path, a hub id, or a loaded causal language model")
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r} is not one of auto, {', '.join(_DTYPES)}")
        dtype = _DTYPES[dtype]
    if isinstance(model, str):
        with _loading("model", model):
            loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                model, dtype=dtype, trust_remote_code=trust_remote_code
            )
        loaded.train(False)
        return loaded
    if isinstance(dtype, torch.dtype) and model.dtype != dtype:
        raise ConfigError(f"the loaded model is {model.dtype}, not dtype={dtype}; convert it first: model.to({dtype})")
    model.train(False)
    return model


def _load_tokenizer(
    model: str | PreTrainedModel, tokenizer: str | PreTrainedTokenizerBase | None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    if tokenizer is None and isinstance(model, str):
        tokenizer = model
    if isinstance(tokenizer, str):
        with _loading("tokenizer", tokenizer):
            loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                tokenizer, trust_remote_code=trust_remote_code
            )
        return loaded
    return tokenizer


def _max_model_len(model: PreTrainedModel, asked: int | None) -> int:
    limit = packed.max_context(model.config)
    if asked is not None:
        asked = checked_whole("max_model_len", asked, 0)
    if asked is None:
        if limit is None:
            raise ConfigError("the model's config states no longest context; give max_model_len")
        return limit
    if asked < 2:
        raise ConfigError(f"max_model_len is {asked}; a prompt and an output need at least 2 tokens")
    if limit is not None and asked > limit:
        raise ConfigError(f"max_model_len is {asked}, but the model's positions reach to {limit}; give at most {limit}")
    return asked


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _eos_token_id(tokenizer: PreTrainedTokenizerBase | None, eos_token_ids: frozenset[int]) -> int | None:
    """The one that ends an output without being its `stop_reason`; further ones count as stop tokens, as in vLLM."""
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return cast(int, tokenizer.eos_token_id)
    return next(iter(eos_token_ids)) if len(eos_token_ids) == 1 else None


def as_params(params: object) -> SamplingParams:
    """These, or an InvalidRequest where they are something else."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"sampling_params is {shown(params)}; give SamplingParams, or a list of one for each prompt"
        )
    return params
