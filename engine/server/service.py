"""`Service`: what the endpoints share: the engine, the model's names, and how prompts become requests of the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from fastapi import Request as HttpRequest

from ..async_engine import AsyncEngine, QueueFull
from ..requests.outputs import RequestOutput
from ..requests.prompts import TokenizedPrompt
from ..requests.request import InvalidRequest
from ..requests.sampling import RequestOutputKind, SamplingParams
from ..streams import Stream, as_they_come
from .bodies import Bodies
from .errors import ApiError, api_error, bad
from .limits import Limits
from .params import as_asked
from .prometheus import Exporter
from .prompts import Prompts
from .protocol import MOST_COMPLETIONS, Sampling
from .settings import ServerSettings
from .state import StateReader
from .streams import until_gone

logger = logging.getLogger(__name__)

_MOST_READY = 256  # prompts whose outputs are written at a time


class Service:
    """One model behind one engine.

    Args:
        root: the model as the operator gave it.
        limits: of a request.

    Attributes:
        names: of the model, the first one for answers.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        metrics: Exporter,
        state: StateReader,
        *,
        root: str,
        limits: Limits,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.state = state
        self.root = root
        self.names = tuple(settings.served_model_name) or (root,)
        self.created = int(time.time())
        self.sampling_defaults = engine.core.loaded.sampling_defaults
        self.text = engine.core.intake.text
        self.max_model_len = engine.core.loaded.max_model_len
        self.limits = limits
        self.bodies = Bodies(self.limits)
        self.prompts = Prompts(engine.core, self.limits, settings.chat_template)

    def close(self) -> None:
        """End what prepares requests; the engine goes on."""
        self.bodies.workers.close()

    def check_model(self, model: str | None) -> None:
        """Raise an ApiError, 404, for a name that the model does not have; an empty one counts as none, as in vLLM."""
        if model and model not in self.names:
            raise ApiError(
                404,
                f"the model {model[:100]!r} does not exist; there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    def check_size(self, prompts: int, params: SamplingParams) -> None:
        """Raise an ApiError, 400, for more completions than can ever be queued."""
        if prompts * params.n > MOST_COMPLETIONS:
            raise bad(f"{prompts} prompts with n={params.n} are over the limit of {MOST_COMPLETIONS} choices", "n")
        limit = self.engine.core.scheduler.max_num_seqs + self.settings.max_num_queued_reqs
        if prompts * params.n > limit:
            raise bad(f"{prompts} prompts with n={params.n} never fit: at most {limit} choices at a time", "n")

    def check_logprobs(self, prompts: Sequence[TokenizedPrompt], params: SamplingParams, *, each: bool = False) -> None:
        """Raise an ApiError, 400, for more log probabilities than an answer can report.

        Args:
            each: every choice reports the prompt, not the answer once.
        """
        count = 0
        for prompt in prompts:
            length = len(prompt.token_ids)
            if params.prompt_logprobs is not None:
                count += (params.n if each else 1) * length * (1 + params.prompt_logprobs)
            # A stream keeps none that it has written.
            if params.logprobs is not None and params.output_kind is not RequestOutputKind.DELTA:
                room = self.max_model_len - length
                longest = room if params.max_tokens is None else min(room, params.max_tokens)
                count += params.n * longest * (1 + params.logprobs)
        if count > self.limits.logprobs:
            raise bad(
                f"the answer could report {count} log probabilities, more than {self.limits.logprobs}; lower logprobs, "
                "max_tokens or n, or send the prompts in several requests",
                "logprobs",
                "too_many_logprobs",
            )

    def shortened(self, prompt: TokenizedPrompt, params: SamplingParams) -> SamplingParams:
        """Params without a `max_tokens` of the client's, for outputs whose log probabilities an answer can report.

        Unchanged where `check_logprobs` refuses what else was asked for.
        """
        if params.logprobs is None or params.output_kind is RequestOutputKind.DELTA:
            return params
        length = len(prompt.token_ids)
        reported = 0 if params.prompt_logprobs is None else length * (1 + params.prompt_logprobs)
        most = (self.limits.logprobs - reported) // (params.n * (1 + params.logprobs))
        longest = self.max_model_len - length if params.max_tokens is None else params.max_tokens
        return replace(params, max_tokens=most) if max(1, params.min_tokens) <= most < longest else params

    async def start(
        self, request: HttpRequest, prompts: Sequence[TokenizedPrompt], params: SamplingParams, body: Sampling
    ) -> Run:
        """Queue these prompts: all of them or none, under names that begin with the id of the HTTP request.

        Raises:
            InvalidRequest, QueueFull, EngineStopped: as `AsyncEngine.add`.
            ApiError: 400, priorities are not known here.
            ClientGone: the client left before they were queued.
        """
        if body.priority and self.engine.core.scheduler.policy != "priority":
            raise bad(
                "priority is not supported here: the server runs requests in order of arrival; start it with "
                "--scheduling-policy priority",
                "priority",
            )
        request_id = request.scope["request_id"]
        if self.settings.log_prompts:
            for prompt in prompts:
                logger.info("prompt", extra={"fields": {"prompt": prompt.text or prompt.token_ids}})
        try:
            adding = self.engine.add_all(prompts, params, prefix=request_id, priority=body.priority or 0)
            return Run(self.engine, await until_gone(request, adding), request_id)
        except QueueFull:
            self.metrics.refused += 1
            raise
        except InvalidRequest as error:
            raise as_asked(error, body) from error


class Run:
    """The prompts of one HTTP request in the engine, which end together when the client leaves.

    Attributes:
        streams: one for each prompt, in order.
    """

    def __init__(self, engine: AsyncEngine, streams: list[Stream], request_id: str) -> None:
        self.streams = streams
        self._engine = engine
        self._request_id = request_id

    async def finals(self, request: HttpRequest) -> list[RequestOutput]:
        """The last output of each prompt.

        Raises:
            ApiError: one of them failed.
            ClientGone: the client left; the prompts are aborted.
            EngineStopped: as the streams.
        """

        async def collect() -> list[RequestOutput]:
            return [(await stream.ready())[-1] for stream in self.streams]

        try:
            finals = await until_gone(request, collect())
        finally:
            self.abort()
        for output in finals:
            self.check(output)
        return finals

    def batches(self) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """The outputs of all prompts as they come, each with the number of its prompt.

        Raises:
            EngineStopped: as the streams.
        """
        return as_they_come(self.streams, _MOST_READY)

    def check(self, output: RequestOutput) -> None:
        """Raise an ApiError for a prompt that failed: 400 if what was asked for is impossible, else 500.

        What the engine raised then goes to the log only.
        """
        if output.error is None:
            return
        told = api_error(output.error)
        if told.status >= 500:
            fields = {"request_id": self._request_id}
            logger.error("a request failed in the engine", exc_info=output.error, extra={"fields": fields})
        raise told from output.error

    def abort(self) -> None:
        """End what has not ended."""
        self._engine.abort([stream.request_id for stream in self.streams])
