"""`LLM`: the engine for a script or a notebook.

    with LLM("path/or/hub-id", kv="virtual", max_model_len=4096) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

`generate` and `chat` run lists of prompts to their ends. `add_request`, `step` and `abort` drive the same loop one
iteration at a time, with requests that come and go.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vattn.attention import Attention
from vattn.engine.beam_search import BeamSearchOutput, BeamSearchParams, make_beams
from vattn.engine.config import EngineConfig
from vattn.engine.core import EngineCore
from vattn.engine.exclusive import exclusive
from vattn.engine.kv.spec import KVCacheDtype
from vattn.engine.requests.intake import as_params
from vattn.engine.requests.outputs import RequestOutput
from vattn.engine.requests.prompts import Conversation, Prompt, as_conversations, as_prompts, cache_salt
from vattn.engine.requests.request import InvalidRequest
from vattn.engine.requests.sampling import RequestOutputKind, SamplingParams
from vattn.engine.scheduling.record import StepRecord
from vattn.engine.scheduling.scheduler import Policy
from vattn.engine.scheduling.static import StaticScheduler
from vattn.engine.scheduling.swap import PreemptionMode
from vattn.errors import ConfigError
from vattn.integers import shown


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
        options = dict(locals())
        del options["self"]
        self.core = core = EngineCore(EngineConfig(**options))
        self.model, self.tokenizer, self.prompts = core.loaded.model, core.loaded.tokenizer, core.intake.prompts
        self.kv, self.scheduler, self.runner = core.kv, core.scheduler, core.runner
        self.token_bytes, self.speculation = core.kv.token_bytes, core.speculation
        self.gate = core.gate

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def on_step(self) -> Callable[[StepRecord], None] | None:
        """Called with a `StepRecord` after each step; may be set at any time."""
        return self.core.on_step

    @on_step.setter
    def on_step(self, on_step: Callable[[StepRecord], None] | None) -> None:
        self.core.on_step = on_step

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
        self.core.check_idle("generate")
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
            self.core.make_group(self.core.new_id(), prompt, param, kind=RequestOutputKind.FINAL_ONLY)
            for prompt, param in zip(listed, params, strict=True)
        ]
        finished: dict[str, RequestOutput] = {}
        with _progress_bar(len(groups), use_tqdm) as bar:
            try:
                for group in groups:
                    self.core.add_group(group)
                while self.core.has_unfinished():
                    for output in self.core.step():
                        finished[output.request_id] = output
                        bar.update()
            except BaseException as error:
                self.core.abandon(error)
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
        self.core.check_idle("beam_search")
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params is {shown(params)}; give BeamSearchParams")
        if isinstance(self.scheduler, StaticScheduler):
            raise ConfigError("beam search needs scheduling='continuous': beams come and go in every step")
        groups = []
        for prompt in as_prompts(prompts):
            text, token_ids = self.prompts.read(prompt)
            groups.append(
                make_beams(
                    self.core.new_id(),
                    text,
                    token_ids,
                    params,
                    kv=self.kv,
                    max_num_seqs=self.scheduler.max_num_seqs,
                    max_model_len=self.core.intake.max_model_len,
                    cache_salt=cache_salt(prompt),
                    eos_token_ids=self.core.intake.eos_token_ids,
                )
            )
        queue = list(reversed(groups))
        try:
            while queue or self.core.has_unfinished():
                while queue and (self.core.num_groups + 1) * params.beam_width <= self.scheduler.max_num_seqs:
                    self.core.add_group(queue.pop())
                self.core.step()
        except BaseException as error:
            self.core.abandon(error)
            raise
        decode = (
            None if self.tokenizer is None else functools.partial(self.core.intake.text.of, skip_special_tokens=False)
        )
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
        self.core.add_group(
            self.core.make_group(
                request_id,
                prompt,
                params,
                kind=params.output_kind or RequestOutputKind.CUMULATIVE,
                priority=priority,
            )
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, all of its completions, and free its memory.

        Returns:
            What it had; None for a request that is unknown or finished.

        Raises:
            EngineBusy: another thread uses this LLM.
        """
        return self.core.abort(request_id)

    def has_unfinished(self) -> bool:
        """Whether requests from `add_request` wait or run."""
        return self.core.has_unfinished()

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
        return self.core.step()

    def check(self) -> None:
        """Assert that cache and queues agree. For tests and idle moments."""
        self.core.check()

    def close(self) -> None:
        """End what runs, give the cache back and restore the model's attention. Idempotent.

        A step in another thread is waited for; that thread's `generate` then raises `EngineClosed`. Called from
        `on_step`, it takes effect when the call that makes the steps ends, which it then does at once.
        """
        self.core.close()


def _progress_bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, desc="Processed prompts", unit="req", disable=not shown, dynamic_ncols=True)
