"""From a plan to logits: packs the plan's tokens into one batch and runs the model once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from vattn.attention import Attention, AttentionParams, PackedBatch, Span
from vattn.packed import LatentAttention, handing_on, run_packed

from ..kv.base import KVBackend
from ..requests.request import Request
from ..scheduling.scheduler import Entry
from .decoder_layer import Recorder
from .forward import Forward, PromptRow, Row
from .graphs import DecodeGraphs


@dataclass(frozen=True)
class _Step:
    """What transformers' attention function calls: store the new keys and values, then attend."""

    kv: KVBackend
    attention: Attention
    batch: PackedBatch
    latents: Mapping[int, LatentAttention]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self.kv.write(layer, self.batch, key, value)
        latent = self.latents.get(layer)
        if latent is not None:
            return latent.attend(self.attention, query, self.kv, self.batch, params)
        return self.attention(query, self.kv, layer, self.batch, params)


class ModelRunner:
    """One model over one backend.

    Args:
        model: in eval mode, its attention implementation set to `"vattn"`.
        latents: the layers whose latents the backend stores; see `vattn.packed.latents`.
        graphs_up_to: run decode steps of at most so many requests as CUDA graphs, if there is CUDA and the kernel can
            be captured; None for no graphs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVBackend,
        attention: Attention,
        *,
        latents: Mapping[int, LatentAttention] | None = None,
        graphs_up_to: int | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.attention = attention
        self.latents = latents or {}
        if model.device.type == "cuda":
            # torch tries cuDNN first on Hopper, which plans anew, for 23 to 37 ms, for every shape: for every token.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.graphs = None
        if graphs_up_to is not None and DecodeGraphs.possible(model.device, attention):
            self.graphs = DecodeGraphs(self._forward, kv, model.device, graphs_up_to)
        self._watching = False
        self._hidden: Tensor | None = None
        # Some model heads call the decoder inside the base model instead of the base model.
        bodies = {model.base_model, cast(Any, model).get_decoder()} - {model}
        note = weakref.WeakMethod(self._note_hidden)  # the model must not keep an engine alive that was dropped

        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if (noted := note()) is not None:
                noted(output)

        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False
        for body in bodies:
            self._hooks.append(body.register_forward_hook(hook))

    def close(self) -> None:
        """Drop the graphs, and leave the model as it was."""
        self.graphs = None
        _remove(self._hooks)

    def rehearse(self, num_tokens: int) -> None:
        """Compute a step of so many tokens without the cache; a cheap function stands in for attention."""
        tokens = torch.arange(num_tokens, device=self.model.device)
        embedding: Any = self.model.get_input_embeddings()
        run_packed(self.model, Recorder(), tokens % embedding.num_embeddings, torch.zeros_like(tokens), tokens[-8:])

    def run(self, entries: Sequence[Entry]) -> Forward:
        """Compute the entries' tokens, which the backend is prepared for."""
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
            if len(entry) > 1 and request.publishes:
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
        self._watching, self._hidden = bool(chunks), None
        try:
            logits = self._forward(
                batch,
                torch.tensor(tokens, device=device),
                torch.tensor(places + prompt_places, dtype=torch.int64, device=device),
            )
            finite = self._finite(chunks) if chunks else {}
        finally:
            self._watching, self._hidden = False, None
        return Forward(rows, logits[: len(rows)], prompt_rows, logits[len(rows) :], finite)

    def _finite(self, chunks: Mapping[Request, slice]) -> dict[Request, bool]:
        """Whether the last hidden states of these rows are finite.

        A token attends to itself in every layer, whatever the window: if its keys or values are NaN, or its values
        infinite, the output of its own row is not finite. The last row of a chunk is not enough, since windows may hide
        the wrong tokens from it.
        """
        if self._hidden is None:
            return dict.fromkeys(chunks, False)
        with torch.inference_mode():
            rows = self._hidden[0].sum(dim=-1, dtype=torch.float32).isfinite().cpu()
        return {request: bool(rows[place].all()) for request, place in chunks.items()}

    def _note_hidden(self, output: Any) -> None:
        if self._watching:
            self._hidden = output[0]

    def _forward(self, batch: PackedBatch, tokens: Tensor, rows: Tensor) -> Tensor:
        step = _Step(self.kv, self.attention, batch, self.latents)
        with handing_on(self.latents.values()):
            return run_packed(self.model, step, tokens, batch.positions, rows)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
