"""The engine: a model, a cache, a scheduler, and the loop that drives them.

    with LLM("path/or/hub-id", kv="virtual", max_model_len=4096) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

`generate` runs a list of prompts to their ends. `add_request`, `step` and `abort` drive the same loop one iteration
at a time, with requests that come and go.
"""

from __future__ import annotations

import itertools
import logging
import operator
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine import optimize
from engine.kv import KVStats
from engine.kv.make import make_backend
from engine.outputs import RequestOutput
from engine.request import FinishReason, InvalidRequest, Request
from engine.runner import ModelRunner
from engine.sampling import SamplingParams, sample
from engine.scheduler import SCHEDULING, Plan, Scheduler, check_limits
from engine.scheduling_static import StaticScheduler
from vattn import hf
from vattn.attention import get as get_attention
from vattn.errors import ConfigError, OutOfPages, VattnError

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]

logger = logging.getLogger(__name__)

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
        dtype: of weights and cache; `"auto"` takes the checkpoint's.
        max_num_seqs: most requests that run at a time.
        max_num_batched_tokens: most tokens of one step; longer prompts are computed in chunks.
        max_model_len: most tokens of a request, prompt and output; the model's own limit by default.
        memory_budget: of the cache: bytes, or text such as "4GiB"; "auto" takes a share of the memory that is free once
            the model is loaded, see `vattn.KVConfig`.
        block_size: tokens per block, for `paged`.
        kv_options: further options of `vattn.KVConfig`, for `virtual`.
        attention: kernel, see `vattn.attention.names()`.
        enforce_eager: run the model's modules as transformers wrote them, never as `engine.optimize` does.
        seed: of requests that bring none; None to draw one.
        on_step: called with a `StepRecord` after each step. May be set later.

    Raises:
        ConfigError: an argument that is unknown, contradictory or impossible; `UnsupportedModel` is one.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        kv: str = "virtual",
        scheduling: str = "continuous",
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str | torch.dtype = "auto",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        memory_budget: int | str = "4GiB",
        block_size: int = 16,
        kv_options: Mapping[str, Any] | None = None,
        attention: str = "auto",
        enforce_eager: bool = False,
        seed: int | None = 0,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        check_limits(max_num_seqs, max_num_batched_tokens)
        if scheduling not in SCHEDULING:
            raise ConfigError(f"scheduling={scheduling!r} is not known; choose one of {', '.join(SCHEDULING)}")
        self.model = _load_model(model, dtype)
        self.tokenizer = None if skip_tokenizer_init else _load_tokenizer(model, tokenizer)
        hf.check_supported(self.model)
        self.max_model_len = _max_model_len(self.model, max_model_len)
        embedding: Any = self.model.get_input_embeddings()
        self.vocab_size: int = embedding.num_embeddings
        self.on_step = on_step
        self._eos_token_ids = _eos_token_ids(self.model, self.tokenizer)
        self._seeds = random.Random(seed)
        self._names = itertools.count()
        self._requests: dict[str, Request] = {}
        self._closed = False
        self._restore_model: Callable[[], None] = lambda: None

        hf.register()
        self._previous_attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(hf.NAME)
        try:
            kernel = get_attention(attention, device=self.model.device, dtype=self.model.dtype)
            self.kv = make_backend(
                kv,
                hf.kv_shape(self.model),
                dtype=self.model.dtype,
                device=self.model.device,
                max_num_seqs=max_num_seqs,
                max_model_len=self.max_model_len,
                memory_budget=memory_budget,
                block_size=block_size,
                guard_rows=kernel.guard_rows,
                kv_options=dict(kv_options or {}),
            )
            limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
            self.scheduler = (
                Scheduler(self.kv, **limits)
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
        self.runner = ModelRunner(self.model, self.kv, kernel)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs, give the cache back and restore the model's attention. Again is harmless."""
        if self._closed:
            return
        for request_id in list(self._requests):
            self.abort(request_id)
        self._closed = True
        self.kv.close()
        self._restore_model()
        self.model.set_attn_implementation(self._previous_attention)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their ends.

        Args:
            prompts: one or many: text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: for all, or one for each; the default ones for None.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output per prompt, in their order. A request that failed has finish reason "error", and says why.

        Raises:
            InvalidRequest: a prompt that can never run; none of the prompts was started.
            VattnError: requests from `add_request` are unfinished, whose outputs would be lost.
        """
        if self.has_unfinished():
            raise VattnError(
                f"generate() was called with {len(self._requests)} unfinished requests; finish or abort them first, or "
                "use add_request() and step()"
            )
        listed = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        else:
            params = list(sampling_params)
        if len(params) != len(listed):
            raise ConfigError(
                f"{len(listed)} prompts with {len(params)} sampling parameters; give one, or one for each"
            )

        requests = [
            self._make_request(self._new_id(), prompt, param) for prompt, param in zip(listed, params, strict=True)
        ]
        finished: dict[str, RequestOutput] = {}
        with _progress_bar(len(requests), use_tqdm) as bar:
            try:
                for request in requests:
                    self._add(request)
                while self.has_unfinished():
                    for output in self.step():
                        if output.finished:
                            finished[output.request_id] = output
                            bar.update()
            except BaseException:
                for request in requests:
                    self.abort(request.request_id)
                raise
        return [finished[request.request_id] for request in requests]

    def add_request(self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Queue a request under a name of the caller's, which no unfinished request may have.

        Raises:
            InvalidRequest: the prompt is empty, too long, not in the vocabulary, or would never fit the cache.
        """
        if request_id in self._requests:
            raise InvalidRequest(f"a request {request_id!r} is unfinished; choose another name, or abort it first")
        self._add(self._make_request(request_id, prompt, sampling_params or SamplingParams()))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its memory.

        Returns:
            What it had; None for a request that is unknown or finished.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.scheduler.finish(request, FinishReason.ABORT)
        return self._output(request)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """One iteration: plan, prepare memory, run the model once, sample.

        Returns:
            The requests that got a token or ended. One that failed ended with finish reason "error"; an exception in
            the model fails the requests of that step, and the others go on.
        """
        if self._closed:
            raise VattnError("this LLM is closed; make a new one")
        start = time.monotonic()
        changed: list[Request] = []
        plan, num_preempted, prepare_seconds = self._plan(changed)
        planned = time.monotonic()
        decode_tokens = plan.num_decode_tokens
        if plan.entries:
            self._compute(plan, changed)
        finished = [request for request in changed if request.finish_reason is not None]
        for request in finished:
            del self._requests[request.request_id]
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
            )
            self.on_step(record)
        return [self._output(request) for request in changed]

    def check(self) -> None:
        """Assert that cache and queues agree: every slot in use is a running request's. For tests and idle moments."""
        self.kv.check()
        self.scheduler.check()
        assert len(self._requests) == len(self.scheduler.running) + len(self.scheduler.waiting)

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
                return plan, preempted, seconds + time.monotonic() - start
            except OutOfPages as error:
                refused = True
                if len(self.scheduler.running) > 1:
                    self.scheduler.preempt_youngest()
                    preempted += 1
                else:
                    self._fail(plan, error, changed)
            except VattnError as error:
                self._fail(plan, error, changed)
            seconds += time.monotonic() - start

    def _compute(self, plan: Plan, changed: list[Request]) -> None:
        """Run a prepared plan; requests that got a token or failed are added to `changed`."""
        try:
            sampled, logits = self.runner.run(plan.entries)
            tokens = sample(logits, sampled)
        except Exception as error:
            self._fail(plan, error, changed)
            return
        for entry in plan.entries:
            entry.request.advance(entry.end)
        for request, token in zip(sampled, tokens, strict=True):
            request.append(token)
            if request.finish_reason is not None:
                self.scheduler.release(request)
        changed += sampled

    def _fail(self, plan: Plan, error: Exception, changed: list[Request]) -> None:
        logger.error("a step of %d requests failed", len(plan.entries), exc_info=error)
        error.__traceback__ = None  # its frames would keep the step's tensors alive as long as the outputs
        for entry in plan.entries:
            self.scheduler.finish(entry.request, FinishReason.ERROR, error)
            changed.append(entry.request)

    def _new_id(self) -> str:
        return next(name for name in map(str, self._names) if name not in self._requests)

    def _make_request(self, request_id: str, prompt: Prompt, sampling: SamplingParams) -> Request:
        """Check a prompt and build its request.

        Raises:
            InvalidRequest: says what is wrong with the prompt.
        """
        text, token_ids = self._tokenize(prompt)
        if not token_ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens, but max_model_len is {self.max_model_len} and the output "
                "needs at least one; shorten the prompt, or set max_model_len higher"
            )
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"the prompt holds {token}, which is no token id of this model: those are whole numbers from "
                    f"0 to {self.vocab_size - 1}"
                )
        request = Request(
            request_id,
            token_ids,
            sampling,
            max_total_tokens=min(len(token_ids) + sampling.max_tokens, self.max_model_len),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            eos_token_ids=self._eos_token_ids,
            prompt=text,
        )
        self.scheduler.check_fits(request)
        return request

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _as_token_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidRequest(
                    f"a prompt with the keys {sorted(prompt)} has neither 'prompt' nor 'prompt_token_ids'"
                )
            prompt = cast(str, prompt["prompt"])
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest(
                    "the prompt is text, but this LLM has no tokenizer; give token ids, or pass tokenizer=..."
                )
            return prompt, list(self.tokenizer(prompt)["input_ids"])
        return None, _as_token_ids(prompt)

    def _add(self, request: Request) -> None:
        if self._closed:
            raise VattnError("this LLM is closed; make a new one")
        self.scheduler.add(request)
        self._requests[request.request_id] = request

    def _output(self, request: Request) -> RequestOutput:
        return RequestOutput.of(request, self._detokenize if self.tokenizer is not None else None)

    def _detokenize(self, token_ids: list[int]) -> str:
        assert self.tokenizer is not None
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is text, a mapping, or a sequence that starts with a number; an empty sequence is no prompts."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _as_token_ids(prompt: object) -> list[int]:
    try:
        return [operator.index(token) for token in cast(Sequence[int], prompt)]
    except TypeError:
        raise InvalidRequest(
            "a prompt is text, a sequence of whole numbers (token ids), or a mapping with 'prompt' or "
            f"'prompt_token_ids'; this is {str(prompt)[:80]!r}"
        ) from None


def _progress_bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, desc="Processed prompts", unit="req", disable=not shown, dynamic_ncols=True)


def _load_model(model: str | PreTrainedModel, dtype: str | torch.dtype) -> PreTrainedModel:
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r} is not one of auto, {', '.join(_DTYPES)}")
        dtype = _DTYPES[dtype]
    if isinstance(model, str):
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        loaded.train(False)
        return loaded
    if isinstance(dtype, torch.dtype) and model.dtype != dtype:
        raise ConfigError(f"the loaded model is {model.dtype}, not dtype={dtype}; convert it first: model.to({dtype})")
    model.train(False)
    return model


def _load_tokenizer(
    model: str | PreTrainedModel, tokenizer: str | PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase | None:
    if tokenizer is None and isinstance(model, str):
        tokenizer = model
    if isinstance(tokenizer, str):
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer)
        return loaded
    return tokenizer


def _max_model_len(model: PreTrainedModel, asked: int | None) -> int:
    limit = hf.max_context(model.config)
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
