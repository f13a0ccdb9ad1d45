"""From a plan to logits: packs the plan's tokens into one batch and runs the model once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vattn.attention import Attention, AttentionParams, PackedBatch, Span
from vattn.errors import ConfigError
from vattn.packed import LatentAttention, handing_on, run_packed

from ..kv.base import KVBackend
from ..requests.request import Request
from ..scheduling.scheduler import Entry
from .decoder_layer import Recorder
from .forward import FiniteChunks, Forward, PromptRow, Row
from .graphs import DecodeGraphs
from .native_layers import CacheLayers

# Of a span, attended for one by one: what is sampled, and drafts. More are log probabilities of a prompt, whose keys
# would be read for each of its tokens.
_MOST_ROWS = 8


@dataclass
class _Step:
    """What transformers' attention function calls: store the new keys and values, then attend.

    Attributes:
        shared: of layers that attend to the keys and values of an earlier one, that one.
        watched: a layer; None for none.
        finite: whether a token's keys and values in that layer are finite, `[T]` bool; None until it has run.
    """

    kv: KVBackend
    attention: Attention
    batch: PackedBatch
    latents: Mapping[int, LatentAttention]
    caches: CacheLayers
    shared: Mapping[int, int]
    watched: int | None = None
    finite: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        layer = self._store(layer, key, value)
        return self._attend(layer, query, self.batch, params)

    def attend_rows(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, rows: Tensor
    ) -> Tensor:
        layer = self._store(layer, key, value)
        if len(rows) > _MOST_ROWS * len(self.batch.spans):
            return self._attend(layer, query, self.batch, params)[rows]
        if not len(rows):
            return value.new_empty(0, query.shape[1], value.shape[2])
        return self._attend(layer, query[rows], self.batch.singles(rows), params)

    def _store(self, layer: int, key: Tensor, value: Tensor) -> int:
        """The layer whose keys and values these are; stores them, if they are its own."""
        if layer in self.shared:
            return self.shared[layer]
        if layer == self.watched:
            self.finite = _are_finite(key) & _are_finite(value)
        self.kv.write(layer, self.batch, key, value)
        return layer

    def _attend(self, layer: int, query: Tensor, batch: PackedBatch, params: AttentionParams) -> Tensor:
        latent = self.latents.get(layer)
        if latent is not None:
            return latent.attend(self.attention, query, self.kv, batch, params)
        return self.attention(query, self.kv, layer, batch, params)


class ModelRunner:
    """One model over one backend.

    Args:
        model: in eval mode, its attention implementation set to `"vattn"`.
        latents: the layers whose latents the backend stores; see `vattn.packed.latents`.
        shared: of layers after those that the backend stores, the one to whose keys and values each attends.
        graphs_up_to: run decode steps of at most so many requests as CUDA graphs, if there is CUDA and the kernel can
            be captured; None for no graphs.

    Attributes:
        launches: whether `run` returns before the device has computed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVBackend,
        attention: Attention,
        *,
        latents: Mapping[int, LatentAttention] | None = None,
        shared: Mapping[int, int] | None = None,
        graphs_up_to: int | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.attention = attention
        self.latents = latents or {}
        self._caches = CacheLayers(kv, attention, besides=self.latents)
        self.launches = model.device.type == "cuda"
        if self.launches:
            # torch tries cuDNN first on Hopper, which plans anew, for 23 to 37 ms, for every shape: for every token.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.graphs = None
        if graphs_up_to is not None and DecodeGraphs.possible(model.device, attention):
            self.graphs = DecodeGraphs(self._forward, kv, model.device, graphs_up_to)
        self._shared = shared or {}
        num_layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
        self._last_stored = num_layers - len(self._shared) - 1

    def close(self) -> None:
        """Drop the graphs."""
        self.graphs = None

    def weights_changed(self) -> None:
        """Have the next steps compute with the weights that the model has now."""
        if self.graphs is not None:
            self.graphs.drop()

    def rehearse(self, num_tokens: int) -> None:
        """Compute a step of so many tokens without the cache; a cheap function stands in for attention."""
        tokens = torch.arange(num_tokens, device=self.model.device)
        embedding: Any = self.model.get_input_embeddings()
        run_packed(self.model, Recorder(), tokens % embedding.num_embeddings, torch.zeros_like(tokens), tokens[-8:])

    def run(self, entries: Sequence[Entry]) -> Forward:
        """Compute the entries' tokens, which the backend is prepared for.

        Raises:
            ConfigError: the model is in training mode.
        """
        if self.model.training:
            raise ConfigError(
                f"{type(self.model).__name__} is in training mode, whose dropout would also be in what is cached; call "
                "model.eval() first"
            )
        # Everything below is in the batch's order: spans of one token first.
        ordered = sorted(entries, key=lambda entry: entry.end - entry.start > 1)
        spans = []
        for entry in ordered:
            assert entry.request.slot is not None
            spans.append(Span(entry.request.slot, entry.start, entry.end))
        batch = PackedBatch(tuple(spans), self.model.device)

        tokens: list[int] = []
        rows: list[Row] = []
        prompt_rows: list[PromptRow] = []
        places: list[int] = []  # of `rows`, among the tokens
        prompt_places: list[int] = []
        chunks: dict[Request, slice] = {}
        for entry in ordered:
            request = entry.request
            for position in request.unscored(entry.start, entry.end):
                prompt_rows.append(PromptRow(request, position))
                prompt_places.append(len(tokens) + position - entry.start)
            if request.publishes and (len(entry) > 1 or not entry.samples):
                chunks[request] = slice(len(tokens), len(tokens) + len(entry))
            tokens += request.token_ids(entry.start, entry.end)
            if entry.samples:
                rows.append(Row(request))
                places.append(len(tokens) - 1)
                if entry.draft:
                    rows += [Row(request, ahead) for ahead in range(1, 1 + len(entry.draft))]
                    places += range(len(tokens), len(tokens) + len(entry.draft))
            tokens += entry.draft

        if self.graphs is not None and not prompt_rows and len(rows) == batch.num_singles == len(tokens):
            logits = self.graphs.run(batch.spans, tokens)
            if logits is not None:
                return Forward(rows, logits, prompt_rows, logits[len(rows) :])
        device = self.model.device
        step = self._step(batch, self._last_stored if chunks else None)
        logits = self._compute(
            step,
            torch.tensor(tokens, device=device),
            torch.tensor(places + prompt_places, dtype=torch.int64, device=device),
        )
        assert not chunks or step.finite is not None
        finite = FiniteChunks(step.finite, chunks)
        return Forward(rows, logits[: len(rows)], prompt_rows, logits[len(rows) :], finite)

    def _forward(self, batch: PackedBatch, tokens: Tensor, rows: Tensor) -> Tensor:
        return self._compute(self._step(batch), tokens, rows)

    def _step(self, batch: PackedBatch, watched: int | None = None) -> _Step:
        return _Step(self.kv, self.attention, batch, self.latents, self._caches, self._shared, watched)

    def _compute(self, step: _Step, tokens: Tensor, rows: Tensor) -> Tensor:
        with handing_on(self.latents.values()):
            return run_packed(self.model, step, tokens, step.batch.positions, rows)


def _are_finite(rows: Tensor) -> Tensor:
    """Which rows of `[T, heads, size]` are finite, `[T]`."""
    return rows.sum(dim=(1, 2), dtype=torch.float32).isfinite()
