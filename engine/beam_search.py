"""Beam search over the engine's own steps: a beam is a request, forked when it has several continuations.

As in vLLM: in every step each beam proposes its `2 * beam_width` most probable tokens. Those that end a sequence
complete one; the best `beam_width` of the others are the next beams. In the end completed sequences and beams are
ranked by their log probability divided by their length to the power of `length_penalty`; the length includes the
prompt, but no end-of-sequence token. (transformers divides by the length of the output alone, and lets a sequence end
only with one of the `beam_width` best tokens of all beams; if no sequence ends early, the winners are the same.)

The beams of one prompt advance together. A beam that was scored keeps its slot until the others are scored, too; when
memory is short, it loses the slot to one of them, and keeps its scores, so memory for one of them is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vattn.errors import ConfigError, VattnError
from vattn.integers import shown

from .checks import checked_whole, number
from .kv.base import KVBackend
from .model.forward import Forward
from .requests.outputs import RequestGroup
from .requests.prompts import TokenizedPrompt
from .requests.request import FinishReason, InvalidRequest, Request
from .requests.sampling import RequestOutputKind, SamplingParams
from .scheduling.scheduler import Scheduler

# A sequence's length to this power, or to its negative, is within the range of floats.
_MOST_PENALTY = 32


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search; names and meanings as in vLLM.

    Attributes:
        beam_width: number of sequences that are followed, and returned.
        max_tokens: maximum length of an output.
        ignore_eos: continue after the model's end-of-sequence tokens.
        temperature: without effect: as in vLLM, scores are sums of the model's own log probabilities.
        length_penalty: a sequence's log probability is divided by its length to this power, from -32 to 32; higher
            values favour longer sequences.

    Raises:
        ConfigError: a value out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, temperature=self.temperature)
        if params.max_tokens is None:
            raise ConfigError("max_tokens is None; a beam search needs an end: give a number")
        if params.max_tokens == 0:
            raise ConfigError("max_tokens is 0; a beam is at least one token: give 1 or more")
        penalty = number(self.length_penalty)
        if penalty is None or abs(penalty) > _MOST_PENALTY:
            possible = f"a number from -{_MOST_PENALTY} to {_MOST_PENALTY}"
            raise ConfigError(f"length_penalty is {shown(self.length_penalty)}; give {possible}")
        object.__setattr__(self, "beam_width", checked_whole("beam_width", self.beam_width, 1))
        object.__setattr__(self, "max_tokens", params.max_tokens)
        object.__setattr__(self, "temperature", params.temperature)
        object.__setattr__(self, "length_penalty", penalty)


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that was found.

    Attributes:
        tokens: the prompt's, then the output's, with the end-of-sequence token where one ended it.
        cum_logprob: the sum of the output tokens' log probabilities.
        finish_reason: "stop" or "length".
        stop_reason: the end-of-sequence token, where one ended it.
        text: the tokens as text, without special tokens; empty without a tokenizer.
    """

    tokens: list[int]
    cum_logprob: float
    finish_reason: str
    stop_reason: int | None = None
    text: str = ""


@dataclass(frozen=True)
class BeamSearchOutput:
    """The sequences that a beam search found.

    Attributes:
        sequences: at most `beam_width`, the best first.
        error: what went wrong, where there are none.
    """

    sequences: list[BeamSearchSequence] = field(default_factory=list)
    error: BaseException | None = None


class BeamGroup(RequestGroup):
    """The beams of one prompt, as requests; `requests` are the live ones.

    Invariants: all live beams have equally many tokens, and the rank of the first. `advance` gets the logits that a
    step computed for them; between two rounds each of them runs, waits for its turn, or has been scored.

    Args:
        first: the prompt's request.
        eos_token_ids: tokens that end a sequence.
    """

    def __init__(self, first: Request, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        super().__init__(first.request_id, [first], RequestOutputKind.FINAL_ONLY)
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._logprobs = {first: 0.0}  # of live beams, summed up so far
        self._scores: dict[Request, list[tuple[float, int]]] = {}  # of scored beams, their most probable next tokens
        self._completed: list[BeamSearchSequence] = []  # the best of them, the best first
        self._forks = 0

    def output(self) -> None:
        """Nothing: a search has only a final `result`."""

    def falls_with(self, request: Request) -> list[Request]:
        """All of them: the lost beam may have been the best."""
        return self.unfinished()

    def result(self, decode: Callable[[list[int]], str] | None) -> BeamSearchOutput:
        """The sequences that were found, once no request is unfinished."""
        error = next((request.error for request in self.requests if request.error is not None), None)
        if error is None and any(request.finish_reason is FinishReason.ABORT for request in self.requests):
            error = VattnError("the beam search was aborted; what its beams had is dropped")
        if error is not None:
            return BeamSearchOutput(error=error)
        if decode is None:
            return BeamSearchOutput(self._completed)
        return BeamSearchOutput([replace(found, text=decode(found.tokens)) for found in self._completed])

    def advance(self, beams: Sequence[Request], logits: Tensor, scheduler: Scheduler) -> None:
        """Score the continuations of these beams; once all beams are scored, continue with the best.

        Args:
            beams: live ones, whose tokens are all computed.
            logits: `[len(beams), vocab_size]`, of their next tokens.
            scheduler: theirs.

        Raises:
            FloatingPointError: logits are not finite.
        """
        with torch.inference_mode():
            scores = logits.float().log_softmax(dim=-1)
            values, tokens = scores.topk(min(2 * self._params.beam_width, scores.shape[1]), dim=1)
        for beam, row, ids in zip(beams, values.tolist(), tokens.tolist(), strict=True):
            if not math.isfinite(row[0]):
                raise FloatingPointError("no token can be taken from the logits: they are not finite")
            self._scores[beam] = list(zip(row, ids, strict=True))
            beam.scored = True
        if all(beam.scored for beam in self.requests):
            self._choose(scheduler)

    def _choose(self, scheduler: Scheduler) -> None:
        continuations: list[tuple[float, Request, int]] = []
        for beam in self.requests:
            beam.scored = False
            for logprob, token in self._scores.pop(beam):
                total = self._logprobs[beam] + logprob
                if token in self._eos_token_ids:
                    self._complete(beam, token, total, FinishReason.STOP)
                else:
                    continuations.append((total, beam, token))
        best = sorted(continuations, key=lambda found: found[0], reverse=True)[: self._params.beam_width]
        length, longest = self.requests[0].num_tokens + 1, self.requests[0].max_total_tokens
        if length == longest:
            for total, beam, token in best:
                self._complete(beam, token, total, FinishReason.LENGTH)
        if length == longest or not best or self._is_decided(best[0][0], length, longest):
            for beam in self.requests:
                scheduler.finish(beam, FinishReason.LENGTH)
        else:
            self._continue(best, scheduler)

    def _continue(self, best: Sequence[tuple[float, Request, int]], scheduler: Scheduler) -> None:
        """Make these continuations the live beams: the first one of a beam in its slot, the others in forks of it."""
        continued = {beam for _, beam, _ in best}
        for beam in self.requests:
            if beam not in continued:
                scheduler.finish(beam, FinishReason.ABORT)  # before the forks, which may need its memory
        taken: set[Request] = set()
        live: list[tuple[Request, float, int]] = []
        for total, beam, token in best:
            live.append((self._branch(beam, scheduler) if beam in taken else beam, total, token))
            taken.add(beam)
        for beam, _, token in live:
            if beam.slot is None:
                beam.output_token_ids.append(token)  # there was no room for it: all its tokens will be computed
            else:
                beam.append(token)
        self.requests = [beam for beam, _, _ in live]
        self._logprobs = {beam: total for beam, total, _ in live}

    def _branch(self, beam: Request, scheduler: Scheduler) -> Request:
        """Another beam with the tokens of this one, in a fork of its slot or queued."""
        self._forks += 1
        child = Request(
            f"{self._forks}_{self.request_id}",
            beam.prompt_token_ids,
            beam.sampling,
            max_total_tokens=beam.max_total_tokens,
            seed=beam.seed,
            cache_salt=beam.cache_salt,
            parent_id=self.request_id,
            index=self._forks,
            takes_drafts=False,
        )
        child.output_token_ids = beam.output_token_ids.copy()
        child.arrival_number = beam.arrival_number
        child.arrival_time, child.first_scheduled_time = beam.arrival_time, beam.first_scheduled_time
        child.first_token_time, child.last_token_time = beam.first_token_time, beam.last_token_time
        if beam.slot is None or not scheduler.fork(beam, child):
            scheduler.queue(child)
        self.requests = [*self.requests, child]  # so that it falls with the others if a later one cannot be made
        return child

    def _complete(self, beam: Request, token: int, total: float, reason: FinishReason) -> None:
        stop = token if reason is FinishReason.STOP else None
        tokens = [*beam.token_ids(0, beam.num_tokens), token]
        self._completed.append(BeamSearchSequence(tokens, total, reason.value, stop))
        self._completed.sort(key=self._score, reverse=True)  # stable: of equals the first stays the first
        del self._completed[self._params.beam_width :]

    def _score(self, found: BeamSearchSequence) -> float:
        return self._penalized(found.cum_logprob, len(found.tokens) - (found.stop_reason is not None))

    def _penalized(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._params.length_penalty)

    def _is_decided(self, logprob: float, length: int, longest: int) -> bool:
        """Whether no beam can beat the completed sequences: a log probability only falls as a beam grows."""
        if len(self._completed) < self._params.beam_width:
            return False
        attainable = max(self._penalized(logprob, length), self._penalized(logprob, longest))
        return attainable <= self._score(self._completed[-1])


def make_beams(
    request_id: str,
    prompt: TokenizedPrompt,
    params: BeamSearchParams,
    *,
    kv: KVBackend,
    max_num_seqs: int,
    max_model_len: int,
    eos_token_ids: frozenset[int],
) -> BeamGroup:
    """The beams of a prompt: initially one.

    Raises:
        InvalidRequest: so many beams could never run together.
    """
    longest = min(max_model_len, len(prompt.token_ids) + params.max_tokens)
    width = params.beam_width
    if width > max_num_seqs:
        raise InvalidRequest(
            f"beam_width is {width}, but max_num_seqs is {max_num_seqs}; lower the one or raise the other"
        )
    needed, total = width * kv.needed(longest), kv.total()
    if needed > total:
        raise InvalidRequest(
            f"{width} beams of up to {longest} tokens may take {needed} units of KV cache ({kv.name}), but there are "
            f"{total} in all; lower beam_width or max_tokens, or give the cache more memory"
        )
    sampling = SamplingParams(temperature=0, max_tokens=params.max_tokens, ignore_eos=True)
    first = Request(
        request_id,
        prompt.token_ids,
        sampling,
        max_total_tokens=longest,
        seed=0,
        cache_salt=prompt.cache_salt,
        prompt=prompt.text,
        takes_drafts=False,
    )
    return BeamGroup(first, params, eos_token_ids)


def take_beams(
    forward: Forward, groups: Mapping[str, RequestGroup]
) -> tuple[Forward, list[tuple[BeamGroup, list[Request], Tensor]]]:
    """A step's results without those of beams, and for each group its beams with their logits."""
    places: dict[BeamGroup, list[int]] = {}
    rest = []
    for place, row in enumerate(forward.rows):
        group = groups[row.request.parent_id]
        if isinstance(group, BeamGroup):
            places.setdefault(group, []).append(place)
        else:
            rest.append(place)
    if not places:
        return forward, []
    beams = [
        (group, [forward.rows[place].request for place in own], forward.logits[own]) for group, own in places.items()
    ]
    return replace(forward, rows=[forward.rows[place] for place in rest], logits=forward.logits[rest]), beams
