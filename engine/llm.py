"""`LLM`: the engine for a script or a notebook.

    with LLM("path/or/hub-id", kv="virtual", max_model_len=4096) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

`generate` and `chat` run lists of prompts to their ends. `add_request`, `step` and `abort` drive the same loop one
iteration at a time, with requests that come and go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import PreTrainedTokenizerBase

from vattn.errors import ConfigError
from vattn.integers import shown

from .absent import absent
from .beam_search import BeamSearchOutput, BeamSearchParams, make_beams
from .checks import whole
from .config import EngineConfig
from .core import EngineCore
from .exclusive import EngineBusy, exclusive
from .metrics import Metric
from .model.threads import Phase
from .options import documents_options_of, takes_options_of
from .progress import Progress, UseTqdm
from .requests.chat import Conversation, as_conversations
from .requests.intake import as_params, refuse_lora
from .requests.outputs import RequestGroup, RequestOutput
from .requests.prompts import Prompt, as_prompts
from .requests.request import InvalidRequest
from .requests.sampling import RequestOutputKind, SamplingParams
from .scheduling.record import StepRecord


@documents_options_of(EngineConfig)
class LLM:
    """A language model that serves many requests at once.

    Its arguments are the fields of `EngineConfig`: [arguments of LLM](#arguments-of-llm).

    One thread at a time may use it; a second one gets `EngineBusy` at once. Any thread may call `close`.

    Attributes:
        core: the loop underneath.
        model, tokenizer: what is served; the tokenizer may be None.
        prompts: reads prompts, and makes them of conversations.
        token_bytes: bytes of one token in the cache, in all layers.
        speculation: statistics of drafts so far.

    Raises:
        ConfigError: an argument that is contradictory or impossible; `UnsupportedModel` is one.
    """

    @takes_options_of(EngineConfig)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.core = core = EngineCore(EngineConfig(*args, **options))
        self.model, self.tokenizer, self.prompts = core.loaded.model, core.loaded.tokenizer, core.intake.prompts
        self.token_bytes, self.speculation = core.kv.token_bytes, core.speculation
        self.gate = core.gate
        self._finished: dict[str, RequestOutput] | None = None  # of the call that runs, for `abort` to add to

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            absent(self, name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def on_step(self) -> Callable[[StepRecord], None] | None:
        """Called with a `StepRecord` after each step; may be set at any time."""
        return self.core.on_step

    @on_step.setter
    def on_step(self, on_step: Callable[[StepRecord], None] | None) -> None:
        self.core.on_step = on_step

    @property
    def num_threads(self) -> dict[Phase, int]:
        """Threads that compute a step now, by its kind; empty on a device that needs none."""
        return self.core.threads.counts

    @exclusive
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to completion.

        Args:
            prompts: one or many: text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, optionally
                with a `"cache_salt"`: prompts with different salts share nothing in the prefix cache. Any other key,
                such as `"multi_modal_data"`, is refused, unless its value is None.
            sampling_params: for all prompts, or one for each; None for `get_default_sampling_params()`. `output_kind`
                is ignored.
            use_tqdm: show a progress bar on stderr, with tokens per second; or a function that makes one, given tqdm's
                keywords: `functools.partial(tqdm, leave=False)`.
            lora_request: None: adapters are not served.
            priority: for all prompts, or one for each; lower runs earlier, for `scheduling_policy="priority"`.

        Returns:
            One output per prompt, in order. A failed request has finish reason "error", and an `error`; one that
            `on_step` aborts has finish reason "abort".

        Raises:
            InvalidRequest: a prompt that can never run, or parameters of the wrong type; no prompt was started.
            VattnError: requests from `add_request` are unfinished, whose outputs would be lost.
            EngineAsleep: it sleeps.
            EngineBusy: another thread uses this LLM.
            EngineClosed: it is closed, or was closed during the call.
        """
        self.core.check_idle("generate")
        groups = self._groups(prompts, sampling_params, lora_request, priority)
        try:
            names = self._add(groups)
            finished = self._run(use_tqdm)
        except BaseException as error:
            self.core.abandon(error)
            raise
        return [finished[name] for name in names]

    @exclusive
    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[str]:
        """Queue prompts for `wait_for_completion`, or for `step`, whose outputs are then the finished ones only.

        Arguments as for `generate`. While the engine sleeps, the requests wait.

        Returns:
            The name of each request, for `abort`.

        Raises:
            InvalidRequest: as for `generate`; no prompt was queued.
            EngineBusy, EngineClosed: as for `generate`.
        """
        return self._add(self._groups(prompts, sampling_params, lora_request, priority))

    @exclusive
    def wait_for_completion(self, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Run everything that is queued to completion; an error or interrupt drops it all.

        Returns:
            The last output of each request, in order of arrival. One that `on_step` aborts has finish reason "abort".

        Raises:
            EngineAsleep, EngineBusy, EngineClosed: as for `generate`.
        """
        self.core.check_steps("wait_for_completion")
        names = self.core.group_ids
        try:
            finished = self._run(use_tqdm)
        except BaseException as error:
            self.core.abandon(error)
            raise
        return [finished[name] for name in names]

    def _run(self, use_tqdm: UseTqdm) -> dict[str, RequestOutput]:
        """Steps until nothing is left; the last output of each request under its name."""
        finished: dict[str, RequestOutput] = {}
        self._finished = finished
        try:
            with Progress(self.core.num_groups, self.core.figures, use_tqdm) as progress:
                while self.core.has_unfinished():
                    before = len(finished)
                    for output in self.core.step():
                        if output.finished:
                            finished[output.request_id] = output
                    progress.stepped(len(finished) - before)
        finally:
            self._finished = None
        return finished

    def _groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: object,
        priority: int | Sequence[int] | None,
    ) -> list[RequestGroup]:
        """Requests for these prompts, of which none is queued yet."""
        refuse_lora(lora_request)
        listed = as_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _for_each(listed, "sampling parameters", sampling_params, as_params)
        priorities = _for_each(listed, "priorities", 0 if priority is None else priority)
        return [
            self.core.make_group(self.core.new_id(), prompt, param, kind=RequestOutputKind.FINAL_ONLY, priority=rank)
            for prompt, param, rank in zip(listed, params, priorities, strict=True)
        ]

    def _add(self, groups: Sequence[RequestGroup]) -> list[str]:
        """Queue all of these, or none; returns their names."""
        try:
            for group in groups:
                self.core.add_group(group)
        except EngineBusy:  # in the middle of a step, where nothing is added and nothing can be aborted
            raise
        except BaseException:
            for group in groups:
                self.core.abort(group.request_id)
            raise
        return [group.request_id for group in groups]

    @exclusive
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the most probable continuations of prompts.

        A prompt is computed once; a beam with several continuations is forked, and one without is freed.

        Args:
            prompts, lora_request, use_tqdm: as for `generate`.
            concurrency_limit: most prompts at a time; None for as many as have slots for all of their beams.

        Returns:
            One output per prompt, in order. A failed one has no sequences, and an `error`.

        Raises:
            InvalidRequest: a prompt that can never run, or more beams than can run together; nothing was started.
            VattnError: requests from `add_request` are unfinished, whose outputs would be lost.
            ConfigError: the engine was made with `scheduling="static"`.
            EngineAsleep, EngineBusy, EngineClosed: as for `generate`.
        """
        self.core.check_idle("beam_search")
        refuse_lora(lora_request)
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params is {shown(params)}; give BeamSearchParams")
        most = self.core.scheduler.max_num_seqs // params.beam_width
        if concurrency_limit is not None:
            limit = whole(concurrency_limit)
            if limit is None or limit < 1:
                raise InvalidRequest(
                    f"concurrency_limit is {shown(concurrency_limit)}; give a whole number, at least 1, or None"
                )
            most = min(most, limit)
        if self.core.config.scheduling != "continuous":
            raise ConfigError("beam search needs scheduling='continuous': beams come and go in every step")
        groups = []
        for prompt in as_prompts(prompts):
            groups.append(
                make_beams(
                    self.core.new_id(),
                    self.prompts.read(prompt),
                    params,
                    kv=self.core.kv,
                    max_num_seqs=self.core.scheduler.max_num_seqs,
                    max_model_len=self.core.intake.max_model_len,
                    eos_token_ids=self.core.intake.eos_token_ids,
                )
            )
        queue = list(reversed(groups))
        try:
            with Progress(len(groups), self.core.figures, use_tqdm) as progress:
                while queue or self.core.has_unfinished():
                    while queue and self.core.num_groups < most:
                        self.core.add_group(queue.pop())
                    before = self.core.num_groups
                    self.core.step()
                    progress.stepped(before - self.core.num_groups)
        except BaseException as error:
            self.core.abandon(error)
            raise
        decode = (
            None if self.tokenizer is None else functools.partial(self.core.intake.text.of, skip_special_tokens=True)
        )
        return [group.result(decode) for group in groups]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations: `generate` on the prompts that the tokenizer's chat template makes of them.

        Args:
            messages: one conversation or many: `[{"role": "user", "content": "Hello"}, ...]`. A content may also be
                None, or a list of parts of type "text".
            sampling_params, use_tqdm, lora_request, priority: as for `generate`.
            template_options: `chat_template`, `chat_template_content_format`, `add_generation_prompt`,
                `continue_final_message`, `tools` and `chat_template_kwargs`, see `vattn.engine.requests.chat.render`;
                any other is a variable of the template, as in `chat_template_kwargs`.

        Raises:
            InvalidRequest: the tokenizer has no chat template, the template refuses the messages or has no such
                variable, or they are not text.
        """
        prompts = [
            self.prompts.apply_chat_template(conversation, **template_options)
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    @exclusive
    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Queue a request under a name that no unfinished request has.

        Its outputs are cumulative unless `output_kind` says otherwise. While the engine sleeps, it waits.

        Args:
            priority: lower runs earlier; for `scheduling_policy="priority"`.

        Raises:
            InvalidRequest: the name is no text or taken, or the prompt is empty, too long, outside the vocabulary, or
                would never fit the cache.
            EngineBusy, EngineClosed: as for `generate`.
        """
        params = self.get_default_sampling_params() if sampling_params is None else as_params(sampling_params)
        self.core.add_group(
            self.core.make_group(
                request_id, prompt, params, kind=params.output_kind or RequestOutputKind.CUMULATIVE, priority=priority
            )
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, all of its completions, and free its memory.

        Returns:
            What it had; None for a request that is unknown or finished.

        Raises:
            InvalidRequest: the name is no text.
            EngineBusy: another thread uses this LLM.
        """
        output = self.core.abort(request_id)
        if output is not None and self._finished is not None:
            self._finished[request_id] = output
        return output

    def has_unfinished(self) -> bool:
        """Whether requests from `add_request` wait or run."""
        return self.core.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """One iteration: plan, prepare memory, run the model once, sample.

        An exception of `on_step` is raised here, and the step counts: its outputs come with the next one's.

        Returns:
            One output for each request that got a token or ended, as its `output_kind` says. An exception in the model
            fails the requests of that step, with finish reason "error", and the others continue. An interrupt is
            raised, and fails all requests that ran.

        Raises:
            EngineAsleep, EngineBusy, EngineClosed: as for `generate`.
        """
        return self.core.step()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ConfigError: there is none.
        """
        return self.core.loaded.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests without any; see `generation_config`."""
        return self.core.loaded.sampling_params

    def get_metrics(self) -> list[Metric]:
        """What this engine has counted so far and holds now, under vLLM's names.

        They are `Counter`s, `Vector`s, `Gauge`s and `Histogram`s; a server's `/metrics` has the same, without
        `vllm:engine_sleep_state`.

        Raises:
            EngineBusy, EngineClosed: as for `generate`.
        """
        return self.core.get_metrics()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget what earlier requests have computed, so that later ones compute their prompts anew.

        What is on disk (`kv_store`) and what other engines have (`kv_share_prefixes`) stays and is found as before, as
        in vLLM without `reset_connector`, which is not there. Only over a model that was given as an object, the engine
        uses neither from here on.

        Of a model that was given as an object, the weights are packed again, and decode steps captured again: call it
        after changing them, as `load_state_dict` does or otherwise. Modules that have been replaced since, or got hooks
        or another `forward`, are seen with `enforce_eager=True` only.

        Args:
            reset_running_requests: preempt requests that run, which are then computed again from their first token.

        Returns:
            Whether nothing is left in its own cache; False if requests run, which keep and publish what they use.

        Raises:
            EngineBusy, EngineClosed: as for `generate`.
            ConfigError: the weights of the model that was given have other shapes or another type by now.
        """
        return self.core.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1) -> int:
        """Give all physical memory of the KV cache back to the machine, until `wake_up`.

        The prefix cache is forgotten. Unfinished requests lose what was computed and keep their outputs so far; they
        go on after `wake_up`, with the same tokens. In between, `add_request` and `enqueue` queue, `abort` works, and
        all that would compute raises `EngineAsleep`. Addresses stay reserved, so that waking up costs nothing: memory
        comes back as requests need it.

        Args:
            level: 1, the only one: weights stay where they are.

        Returns:
            Bytes that were given back.

        Raises:
            ConfigError: another level, or a backend that cannot, such as `kv="static"`; nothing changed.
            EngineBusy, EngineClosed: as for `generate`.
        """
        return self.core.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """End `sleep`; no effect on an engine that is awake.

        Args:
            tags: what to wake up, of "weights", "kv_cache" and "scheduling", as in vLLM; None for everything. Only the
                cache sleeps here, so without "kv_cache" nothing happens.

        Returns:
            Whether the engine is awake.

        Raises:
            ConfigError: an unknown tag.
            EngineBusy, EngineClosed: as for `generate`.
        """
        return self.core.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and `wake_up` was not since."""
        return self.core.asleep

    def check(self) -> None:
        """Assert that cache and queues agree. For tests and idle moments."""
        self.core.check()

    def close(self) -> None:
        """End what runs, give the cache back and restore the model's attention. Idempotent.

        A step in another thread is waited for; that thread's `generate` then raises `EngineClosed`. Called from
        `on_step`, it takes effect when the call that makes the steps ends, which it then does at once.

        Raises:
            StreamCapturing: a stream of the GPU is capturing a CUDA graph; the cache keeps its memory until `close` is
                called again after the capture.
            DriverError: a driver call failed; the cache keeps its memory.
        """
        self.core.close()


def _for_each(
    prompts: Sequence[Prompt], what: str, given: Any, check: Callable[[Any], Any] = lambda value: value
) -> list[Any]:
    """One checked value for each prompt: those of a list, or the same for all."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [check(given)] * len(prompts)
    values = [check(each) for each in given]
    if len(values) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts with {len(values)} {what}; give one, or one for each")
    return values
