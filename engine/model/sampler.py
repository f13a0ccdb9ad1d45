"""From logits to tokens, for a whole batch at once.

State that depends only on the requests of the batch (parameters as tensors, tokens that penalties look at) is kept from
step to step and rebuilt when the batch changes. The vocabulary is never sorted with indices nor summed up token by
token: filters are thresholds, and a token is drawn from sums of blocks first, then inside its block.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vattn import cpu
from vattn.integers import shown

from ..requests.grammar import CannotGoOn, exclude
from ..requests.request import Request
from .forward import Row

_BLOCK = 128  # tokens whose weights are summed up first
_HEAD = 1024  # most probable tokens that a top-p filter tries before it sorts the whole row
_FEW = 1024  # most biases of a row that are added in one call for all rows, which takes memory for every row
_TINY = torch.finfo(torch.float32).tiny


class Sampler:
    """Chooses tokens.

    A sampled token is where a uniform number falls in the row's cumulative distribution. The number depends only on the
    request's seed and on the index of the token, so a seed gives the same tokens whatever else is in the batch.

    Attributes:
        failures: of the last call, for each row that got no token because of its own request: what a logits processor
            raised, or `CannotGoOn` if everything that the request asks for leaves no token.
    """

    def __init__(self) -> None:
        self.failures: dict[int, Exception] = {}
        self._batch: Batch | None = None
        self._edited = _Scratch()
        self._weights = _Scratch()

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[int | None]:
        """Choose a token for each row.

        Args:
            logits: `[len(rows), vocab_size]`; not changed.
            rows: each request once, and once more for each token of its draft; the logits of a request with a draft
                must not depend on its tokens. A request from the last call's batch has got its token from there since.

        Returns:
            A token per row; None where its largest logit is infinite or NaN, every token is excluded, or a processor
            failed.
        """
        self.failures = {}
        batch = self._batch
        if batch is None or batch.drafted or batch.rows != rows or batch.device != logits.device:
            batch = self._batch = Batch(rows, logits.device, batch)
        given = logits
        if batch.edits():
            logits = self._edited.rows(len(logits), logits.shape[1], logits.device).copy_(logits)
            batch.edit(logits)
            self.failures = batch.process(logits)
            batch.mask(logits)
        tokens, finite = _likeliest(logits)
        if len(batch.drawn):
            tokens[batch.drawn] = self._draw(batch, logits, tokens)
        batch.append(tokens)
        if finite:  # on CUDA this waits for the step: what draws is launched before
            return cast(list[int | None], tokens.tolist())
        largest = logits.max(dim=1).values
        usable = largest.isfinite()
        for row in torch.nonzero(~usable).flatten().tolist() if logits is not given else ():
            if row in self.failures or not math.isfinite(given[row].max()):
                continue
            if rows[row].request.sampling.logits_processors and largest[row] != -math.inf:
                self.failures[row] = ValueError(
                    "logits_processors gave NaN or +inf; give finite scores, and -inf to tokens that are excluded"
                )
            else:
                self.failures[row] = CannotGoOn(
                    "every token is excluded, by what allowed_token_ids, bad_words, min_tokens and structured_outputs "
                    "ask for together; ask for less"
                )
        return [token if good else None for token, good in zip(tokens.tolist(), usable.tolist(), strict=True)]

    def _draw(self, batch: Batch, logits: Tensor, likeliest: Tensor) -> Tensor:
        """Tokens `[D]` of the rows that are not greedy, of the likeliest token of every row."""
        count, vocab_size = len(batch.drawn), logits.shape[1]
        if count < len(logits):
            logits, likeliest = logits[batch.drawn], likeliest[batch.drawn]
        padding = -vocab_size % _BLOCK
        weights = self._weights.rows(count, vocab_size + padding, logits.device)
        weights[:, vocab_size:] = 0
        scaled = weights[:, :vocab_size].copy_(logits)
        # The largest logit becomes 0 first: a tiny temperature must not overflow the others.
        scaled.sub_(logits.gather(1, likeliest[:, None]).float()).div_(batch.temperatures).exp_()
        filter_weights(scaled, batch.min_p, batch.limits)
        return draw(weights, _sent(uniform(batch.seeds, batch.num_tokens), logits.device))


def _likeliest(logits: Tensor) -> tuple[Tensor, bool | Tensor]:
    """The token of each row with the largest logit, or NaN where there is one, and whether all these are finite."""
    if logits.device.type == "cpu" and logits.dtype in cpu.FLOATS and logits.stride(1) == 1 and cpu.unusable() is None:
        return cpu.largest(logits)
    largest, tokens = logits.max(dim=1)
    return tokens, largest.isfinite().all()


class _Scratch:
    """Memory that is reused in every step: fresh pages would cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def rows(self, count: int, width: int, device: torch.device) -> Tensor:
        """float32 `[count, width]`, contiguous, uninitialised."""
        if self._memory.numel() < count * width or self._memory.device != device:
            self._memory = torch.empty(count * width, dtype=torch.float32, device=device)
        return self._memory[: count * width].view(count, width)


def _check_processed(scores: object, width: int, processor: object) -> None:
    """Raise ValueError if a function of `logits_processors` gave no scores."""
    if not isinstance(scores, Tensor) or scores.numel() != width:
        got = list(scores.shape) if isinstance(scores, Tensor) else shown(scores)
        raise ValueError(f"{shown(processor)} of logits_processors gave {got}; it has to return scores, [1, {width}]")


class Batch:
    """The rows of a step as tensors.

    Attributes:
        drafted: it has rows of drafts, so it cannot be used for the next step.
        drawn: `[D]`, the rows that are not greedy. Of these rows are `temperatures` `[D, 1]`, the filters `min_p` and
            `limits` (see `filter_weights`), `seeds` and `num_tokens`, the output tokens so far.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device, previous: Batch | None) -> None:
        self.rows = list(rows)
        self.requests = requests = [row.request for row in rows]
        self.drafted = any(row.ahead for row in rows)
        self.device = device
        params = [request.sampling for request in requests]
        drawn = [row for row, param in enumerate(params) if not param.greedy]
        self.drawn = torch.tensor(drawn, dtype=torch.int64, device=device)
        self.temperatures = _column([max(params[row].temperature, _TINY) for row in drawn], device)
        min_p = [params[row].min_p for row in drawn]
        self.min_p = _column(min_p, device) if any(min_p) else None
        self.limits = Limits.of([params[row].top_k for row in drawn], [params[row].top_p for row in drawn], device)
        self.seeds = np.array([requests[row].seed % 2**64 for row in drawn], dtype=np.uint64)
        self.num_tokens = np.array(
            [len(requests[row].output_token_ids) + rows[row].ahead for row in drawn], dtype=np.uint64
        )

        self.shared: _Shared = _Shared(device, None if previous is None else previous.shared)
        self._allowed = [
            (row, self.shared.ids(param.allowed_token_ids))
            for row, param in enumerate(params)
            if param.allowed_token_ids is not None
        ]
        self._bad_words = [
            (row, request, words, self.shared.ids(words.alone))
            for row, request in enumerate(requests)
            if (words := request.bad_words)
        ]
        self._processed = [(row, request) for row, request in enumerate(requests) if request.sampling.logits_processors]
        structured = [(row, grammar) for row, request in enumerate(requests) if (grammar := request.grammar)]
        self._grammars = [grammar for _, grammar in structured]
        self._grammar_rows = torch.tensor([row for row, _ in structured], dtype=torch.int64, device=device)
        self._held = [
            (row, request, self.shared.ids(request.held_token_ids))
            for row, request in enumerate(requests)
            if request.sampling.min_tokens and not request.may_stop
        ]
        biased = [(row, *self.shared.biases(param.logit_bias)) for row, param in enumerate(params) if param.logit_bias]
        self._few_biases = _together([each for each in biased if len(each[1]) <= _FEW])
        self._many_biases = [each for each in biased if len(each[1]) > _FEW]
        penalized = [row for row, param in enumerate(params) if param.penalized]
        known = previous.history if previous is not None and previous.device == device else None
        self.history: _History | None = (
            _History(penalized, [requests[row] for row in penalized], device, known) if penalized else None
        )

    def edits(self) -> bool:
        """Whether `edit` would change anything in this step."""
        if self._held:
            self._held = [each for each in self._held if not each[1].may_stop]
        return bool(
            self._allowed
            or self._bad_words
            or self._held
            or self._few_biases
            or self._many_biases
            or self.history
            or self._processed
            or self._grammars
        )

    def edit(self, logits: Tensor) -> None:
        """Apply, in place, all changes of logits that come before those of processors and grammars."""
        for row, allowed in self._allowed:
            kept = logits[row, allowed]
            logits[row] = -math.inf
            logits[row, allowed] = kept
        for row, request, words, alone in self._bad_words:
            logits[row].index_fill_(0, alone, -math.inf)
            if last := words.completed(request.output_token_ids):
                logits[row, last] = -math.inf
        for row, _, held in self._held:
            logits[row].index_fill_(0, held, -math.inf)
        if self._few_biases is not None:
            at, biases = self._few_biases
            logits.index_put_(at, biases, accumulate=True)
        for row, ids, biases in self._many_biases:
            logits[row].index_add_(0, ids, biases)
        if self.history is not None:
            self.history.penalize(logits)

    def process(self, logits: Tensor) -> dict[int, Exception]:
        """Let requests' own processors change their rows, in place; excludes every token where one fails.

        Returns:
            Row to what was raised there.
        """
        failures: dict[int, Exception] = {}
        for row, request in self._processed:
            scores = logits[row : row + 1].clone()
            try:
                tokens = torch.tensor([request.token_ids(0, request.num_tokens)], device=logits.device)
                for processor in request.sampling.logits_processors or ():
                    scores = processor(cast(torch.LongTensor, tokens), cast(torch.FloatTensor, scores))
                    _check_processed(scores, logits.shape[1], processor)
                logits[row : row + 1] = scores.view(1, logits.shape[1])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # with those at the end of tasks and generators
                failures[row] = error if isinstance(error, Exception) else RuntimeError(repr(error))
                logits[row] = -math.inf
        return failures

    def mask(self, logits: Tensor) -> None:
        """Exclude, in place, the tokens with which outputs would not keep to their grammars."""
        if self._grammars:
            exclude(logits, self._grammar_rows, self._grammars)

    def append(self, tokens: Tensor) -> None:
        """Note the token that each request gets."""
        self.num_tokens += np.uint64(1)
        if self.history is not None:
            self.history.append(tokens)


class _Shared:
    """What parameters hold as tensors, made once for all requests that share the parameters.

    Args:
        known: of the batch before, for parameters that are in both.
    """

    def __init__(self, device: torch.device, known: _Shared | None) -> None:
        self._device = device
        self._known = known._made if known is not None and known._device == device else {}
        # By identity, as these may have as many entries as the vocabulary; held here, so that no other gets theirs.
        self._made: dict[int, tuple[object, tuple[Tensor, ...]]] = {}

    def ids(self, token_ids: Collection[int]) -> Tensor:
        """int64 `[len(token_ids)]`."""
        return self._tensors(token_ids)[0]

    def biases(self, biases: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        """Token ids, as `ids`, and what is added to their logits, float32."""
        ids, values = self._tensors(biases, biases.values())
        return ids, values

    def _tensors(self, token_ids: Collection[int], values: Collection[float] = ()) -> tuple[Tensor, ...]:
        key = id(token_ids)
        if key not in self._made:
            self._made[key] = self._known.get(key) or (
                token_ids,
                tuple(
                    torch.from_numpy(np.fromiter(each, dtype, len(each))).to(self._device)
                    for each, dtype in ((token_ids, np.int64), (values, np.float32))
                ),
            )
        return self._made[key][1]


class _History:
    """The tokens of requests with penalties, and how often each of them is in the output.

    A step looks at these tokens only, not at the vocabulary. Row i holds prompt and output of request i in its first
    `lengths[i]` columns, and copies of the first token in the others, so that each column is right by itself.

    Args:
        rows: the rows of the requests in the batch.
        known: an older history, to copy requests from that are in it.
    """

    def __init__(self, rows: list[int], requests: list[Request], device: torch.device, known: _History | None) -> None:
        self._requests = requests
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)[:, None]
        capacity = max(request.num_tokens for request in requests) + 64
        self._tokens = torch.empty(len(rows), capacity, dtype=torch.int64, device=device)
        self._counts = torch.empty(len(rows), capacity, dtype=torch.float32, device=device)
        self._lengths = torch.tensor([request.num_tokens for request in requests], device=device)[:, None]
        self._longest = capacity - 64
        old_rows = {request: row for row, request in enumerate(known._requests)} if known is not None else {}
        for row, request in enumerate(requests):
            num_tokens = request.num_tokens
            old = old_rows.get(request)
            if known is not None and old is not None:
                self._tokens[row, :num_tokens] = known._tokens[old, :num_tokens]
                self._counts[row, :num_tokens] = known._counts[old, :num_tokens]
            else:
                tokens = torch.tensor(request.token_ids(0, num_tokens), device="cpu")
                output = tokens[len(request.prompt_token_ids) :]
                counts = torch.bincount(output, minlength=int(tokens.max()) + 1)[tokens]
                self._tokens[row, :num_tokens], self._counts[row, :num_tokens] = tokens, counts.float()
            self._tokens[row, num_tokens:] = self._tokens[row, 0]
            self._counts[row, num_tokens:] = self._counts[row, 0]
        params = [request.sampling for request in requests]
        self._repetition = _column([param.repetition_penalty for param in params], device)
        self._frequency = _column([param.frequency_penalty for param in params], device)
        self._presence = _column([param.presence_penalty for param in params], device)

    def penalize(self, logits: Tensor) -> None:
        """Apply the penalties to their rows of `logits`, in place."""
        tokens, counts = self._tokens[:, : self._longest], self._counts[:, : self._longest]
        values = logits[self._rows, tokens]
        values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0)
        logits[self._rows, tokens] = values  # a repeated token is written repeatedly, with the same value

    def append(self, batch_tokens: Tensor) -> None:
        """Add the newest token of each request; `batch_tokens` is the whole batch's."""
        if self._longest == self._tokens.shape[1]:
            grown = self._longest // 2 + 64
            self._tokens = torch.cat([self._tokens, self._tokens[:, :1].expand(-1, grown)], dim=1)
            self._counts = torch.cat([self._counts, self._counts[:, :1].expand(-1, grown)], dim=1)
        new = batch_tokens[self._rows]
        same = self._tokens == new
        self._counts += same
        count = (self._counts * same).amax(dim=1, keepdim=True).clamp_(min=1)
        self._tokens.scatter_(1, self._lengths, new)
        self._counts.scatter_(1, self._lengths, count)
        self._lengths += 1
        self._longest += 1


@dataclass(frozen=True)
class Limits:
    """top_k and top_p of the rows that have one of them. What steps decide by is on the host, so they need not wait.

    Attributes:
        rows: `[R]`, which these are; None for all.
        top_k: `[R, 1]`, 0 for a row without; None if no row has it.
        top_p: `[R, 1]`, 1 for a row without.
        most: the largest top_k.
        all_top_k: every one of the rows has a top_k.
    """

    rows: Tensor | None
    top_k: Tensor | None
    top_p: Tensor
    most: int
    all_top_k: bool

    @classmethod
    def of(cls, top_k: Sequence[int], top_p: Sequence[float], device: torch.device) -> Limits | None:
        """Those of rows with these; 0 or less, and 1, in a row without. None if there are none."""
        ks, ps = np.maximum(np.array(top_k, np.int64), 0), np.array(top_p, np.float32)
        rows = np.flatnonzero((ks > 0) | (ps < 1))
        if not len(rows):
            return None
        ks, ps = ks[rows], ps[rows]
        return cls(
            None if len(rows) == len(top_k) else torch.from_numpy(rows).to(device),
            torch.from_numpy(ks)[:, None].to(device) if ks.any() else None,
            torch.from_numpy(ps)[:, None].to(device),
            int(ks.max()),
            bool(ks.all()),
        )


def filter_weights(weights: Tensor, min_p: Tensor | None, limits: Limits | None) -> None:
    """Set the weights of tokens that the filters exclude to 0, in place.

    min_p comes first, then top_k, then top_p over what is left. Tokens as probable as the last one that is kept are
    kept too.

    Args:
        weights: `[D, vocab_size]`, not negative, proportional to the probabilities, the largest of each row 1.
        min_p: `[D, 1]`, 0 for a row that does not use it; None where no row does.
        limits: None where no row has any.
    """
    if min_p is not None:
        _drop_below(weights, min_p)
    if limits is None:
        return
    few = weights if limits.rows is None else weights[limits.rows]
    _drop_below(few, _least_kept(few, limits))
    if limits.rows is not None:
        weights[limits.rows] = few


def _drop_below(weights: Tensor, least: Tensor) -> None:
    """Set weights below their row's `least` `[R, 1]` to 0, in place."""
    if weights.device.type == "cpu":  # a fifth of the time that torch takes
        values = weights.numpy()
        np.multiply(values, values >= least.to(weights.dtype).numpy(), out=values)
    else:
        weights.masked_fill_(weights < least, 0)


def _least_kept(weights: Tensor, limits: Limits) -> Tensor:
    """The smallest weight `[R, 1]` that top_k and top_p keep in each row."""
    vocab_size = weights.shape[1]
    head = min(vocab_size, max(_HEAD, limits.most))
    least, missing = _least_of(weights, limits.top_k, limits.top_p, head)
    if head < vocab_size and not limits.all_top_k:
        longer = missing.nonzero().flatten()  # on CUDA this waits; whole rows would take longer to sort
        if len(longer):
            least[longer], _ = _least_of(weights[longer], None, limits.top_p[longer], vocab_size)
    return least


def _least_of(weights: Tensor, top_k: Tensor | None, top_p: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """`_least_kept` by the `head` largest of each row, and in which rows, `[R]`, these have less than the share."""
    largest = _largest(weights, head)
    mass = total = weights.sum(dim=1, keepdim=True)
    if top_k is not None:
        # Of a row with top_k its largest are all there is; they stand at the end.
        beyond = torch.where(top_k > 0, largest.shape[1] - top_k, 0)
        largest.masked_fill_(torch.arange(largest.shape[1], device=weights.device) < beyond, 0)
    if top_k is not None or head < weights.shape[1]:
        mass = largest.sum(dim=1, keepdim=True)
    if top_k is not None:
        total = torch.where(top_k > 0, mass, total)
    # From below, what may be left out ends where the rest still has its share.
    fraction = 1 - top_p * total / mass
    least = largest.gather(1, draw(largest, fraction.clamp(min=0).double().flatten())[:, None])
    return least, (fraction < 0).flatten()


def _largest(weights: Tensor, count: int) -> Tensor:
    """The `count` largest of each row in ascending order, after as many zeros as make whole blocks of them."""
    padding = -count % _BLOCK
    if weights.device.type != "cpu":
        return torch.nn.functional.pad(weights.topk(count).values.flip(1), (padding, 0))
    # numpy's partition and sort use vector instructions that torch's do not: 0.7 and 2.3 ms against 10 and 110 ms for
    # 1024 of 32000, and for all of them, in 32 rows.
    values = weights.numpy()
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=1)[:, -count:]
    padded = np.zeros((len(values), padding + count), dtype=values.dtype)
    padded[:, padding:] = values
    padded[:, padding:].sort(axis=1)
    return torch.from_numpy(padded)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row, with probability proportional to its weight; never one of weight 0.

    Args:
        weights: `[D, n]`, n a multiple of 128.
        uniforms: `[D]` float64 in `[0, 1)`.

    Returns:
        `[D]` int64.
    """
    blocks = weights.view(len(weights), -1, _BLOCK)
    block, fraction = _place(blocks.sum(dim=2, dtype=torch.float32), uniforms[:, None])
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1)
    index, _ = _place(inside, fraction)
    return (block * _BLOCK + index).flatten()


def _place(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Where `fraction` `[D, 1]` of a row's sum is reached, and how far inside that weight: `[D, 1]` both."""
    ends = weights.cumsum(dim=1, dtype=torch.float64)
    # `right=True` never lands on a weight of 0; the clamps hold against rounding at the very end.
    target = ends[:, -1:] * fraction.clamp(max=1 - 2**-52)
    index = torch.searchsorted(ends, target, right=True).clamp_(max=weights.shape[1] - 1)
    end, weight = ends.gather(1, index), weights.gather(1, index).double()
    return index, ((target - end + weight) / weight).clamp_(0, 1)


def uniform(seeds: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Random numbers in `[0, 1)`, number `counts[i]` of the stream of `seeds[i]`: SplitMix64, of the seed's own mix.

    A function of both, without a state: no generator per request to call one by one, nothing to rewind.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    bits = _mix(_mix(seeds) + (counts + np.uint64(1)) * golden)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _together(biased: Sequence[tuple[int, Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
    """Rows with token ids, and what is added there, of biases of single rows; None if there are none."""
    if not biased:
        return None
    rows, ids, biases = zip(*biased, strict=True)
    lengths = torch.tensor([len(each) for each in ids])
    at = torch.tensor(rows).repeat_interleave(lengths).to(ids[0].device)
    return (at, torch.cat(ids)), torch.cat(biases)


def _sent(values: npt.NDArray[np.float64], device: torch.device) -> Tensor:
    """On the device, without waiting for what it computes."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]
