"""From a prompt and its parameters to the requests that complete it."""

from __future__ import annotations

import random
from collections.abc import Mapping

from vattn.integers import shown

from ..checks import LARGEST, whole
from .grammar_compiler import GrammarCompiler
from .outputs import RequestGroup
from .prompts import Prompt, PromptReader
from .request import InvalidRequest, Request
from .sampling import RequestOutputKind, SamplingParams
from .structured import StructuredOutputs
from .text import TokenText


class Intake:
    """Checks what callers ask for and makes requests of it. Any thread may use it.

    Args:
        max_model_len: most tokens of a request, prompt and output.
        eos_token_ids: tokens that end an output.
        eos_token_id: the one of them that is no `stop_reason`.
        max_logprobs: most log probabilities per token; -1 for no limit.
        seed: of the seeds of requests that bring none; None to draw one.
    """

    def __init__(
        self,
        prompts: PromptReader,
        text: TokenText,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        eos_token_id: int | None,
        max_logprobs: int,
        seed: int | None,
    ) -> None:
        self.prompts = prompts
        self.text = text
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_id
        self.grammars = GrammarCompiler(text.tokenizer, prompts.vocab_size, eos_token_ids)
        self.max_logprobs = max_logprobs
        self._seeds = random.Random(seed)

    def has_grammar(self, sampling: SamplingParams) -> bool:
        """Whether the grammar that `sampling` asks for is compiled, or cannot be."""
        wanted = StructuredOutputs.of(sampling.structured_outputs)
        return self.grammars.is_compiled(wanted, ignore_eos=sampling.ignore_eos)

    def make_groups(
        self, prompts: Mapping[str, Prompt], sampling: SamplingParams, *, kind: RequestOutputKind, priority: int = 0
    ) -> list[RequestGroup]:
        """The requests for prompts, by their names: one for each completion.

        Raises:
            InvalidRequest: says what is wrong, with a prompt or with what `sampling` asks of this model.
        """
        sampling = as_params(sampling)
        rank = whole(priority)
        if rank is None or not -LARGEST <= rank <= LARGEST:
            raise InvalidRequest(f"priority is {shown(priority)}; give a whole number of 64 bits", param="priority")
        self._check(sampling)
        bad_words = self.prompts.bad_words(tuple(sampling.bad_words or ()))
        asked = frozenset(sampling.stop_token_ids or ())
        held = asked | self.eos_token_ids
        grammar = None
        if sampling.structured_outputs is not None:
            wanted = StructuredOutputs.of(sampling.structured_outputs)
            grammar = self.grammars.compile(wanted, ignore_eos=sampling.ignore_eos, stop_token_ids=asked)
        groups = []
        for request_id, prompt in prompts.items():
            read = self.prompts.read(prompt, sampling.max_tokens)
            longest = self.max_model_len
            if sampling.max_tokens is not None:
                longest = min(longest, len(read.token_ids) + sampling.max_tokens)
            seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
            requests = [
                Request(
                    request_id if sampling.n == 1 else f"{index}_{request_id}",
                    read.token_ids,
                    sampling,
                    max_total_tokens=longest,
                    seed=seed + index,
                    priority=rank,
                    cache_salt=read.cache_salt,
                    stop_token_ids=asked if sampling.ignore_eos else held,
                    held_token_ids=held,
                    eos_token_id=self.eos_token_id,
                    prompt=read.text,
                    detokenizer=self.text.detokenizer(sampling, read.token_ids),
                    grammar=None if grammar is None else grammar.fork(),
                    bad_words=bad_words,
                    parent_id=request_id,
                    index=index,
                )
                for index in range(sampling.n)
            ]
            groups.append(RequestGroup(request_id, requests, kind))
        return groups

    def _check(self, sampling: SamplingParams) -> None:
        """Raise an InvalidRequest for what this model cannot do."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            token_ids = tuple(getattr(sampling, name) or ())
            self.prompts.check_token_ids(name, token_ids, param=name)
            if len(token_ids) > self.prompts.vocab_size:
                raise InvalidRequest(
                    f"{name} has {len(token_ids)} token ids, but this model has {self.prompts.vocab_size}; give each "
                    "of them once",
                    param=name,
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(sampling, name) or 0
            if self.max_logprobs >= 0 and not 0 <= count <= self.max_logprobs:
                raise InvalidRequest(
                    f"{name} is {'-1, which is all of the vocabulary' if count < 0 else count}, but this engine "
                    f"reports at most max_logprobs={self.max_logprobs}; ask for fewer, or set max_logprobs higher",
                    param=name,
                )
        if self.text.tokenizer is None and (sampling.stop or sampling.bad_words):
            name = "stop" if sampling.stop else "bad_words"
            raise InvalidRequest(f"{name} is text, but this LLM has no tokenizer; pass tokenizer=...", param=name)


def as_params(params: object) -> SamplingParams:
    """`params`, or an InvalidRequest for a value of another type."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"sampling_params is {shown(params)}; give SamplingParams, or a list of one for each prompt",
            param="sampling_params",
        )
    return params


def refuse_lora(lora_request: object) -> None:
    """Raise an InvalidRequest for an adapter."""
    if lora_request is not None:
        raise InvalidRequest(
            "lora_request: adapters are not served; merge the adapter into the model (peft's merge_and_unload) and "
            "load the result",
            param="lora_request",
        )
