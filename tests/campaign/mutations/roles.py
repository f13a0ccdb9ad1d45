"""Mutations of engines that divide the work."""

from __future__ import annotations

from tests.campaign.mutations import mutation
from vattn.engine.roles import decoder, line
from vattn.engine.roles.line import Message


@mutation(None, "rows are not compared with their digest", "roles")
def any_digest() -> None:
    line._digest = lambda key, *parts: bytes(line._DIGEST_BYTES)


@mutation(None, "rows of any tokens are those of the prompt", "roles")
def any_tokens() -> None:
    def take(self: decoder._Lines, of: decoder._Line, came: Message) -> None:
        if (job := of.jobs.get(came.job)) is not None and len(came.tokens) == len(job.rest_ids):
            came.tokens[:] = job.rest_ids
        true(self, of, came)

    true = decoder._Lines._take
    decoder._Lines._take = take  # type: ignore[method-assign]
