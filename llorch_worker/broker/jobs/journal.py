"""A job's event stream as its journal: written under a claim, read by the next attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.scripts import queue_script
from llorch_worker.contract import (
    Event,
    Journal,
    Tokens,
    Vectors,
    decode_event,
    encode_event,
    read_journal,
)

WRITTEN, CANCEL_REQUESTED, IS_READ = 1, 2, 4
"""Bits of the reply to a write."""


@dataclass(frozen=True)
class JournalPage:
    """The events written so far, and the number of the next entry."""

    journal: Journal
    next_entry: int


FIRST_PAGE = JournalPage(Journal(), 1)
"""The journal of a job that was never claimed."""


def read(client: Redis, job_id: str) -> JournalPage:
    """The journal of all attempts so far; ``client`` decodes replies."""
    entries: list[Any] = client.xrange(keys.events(job_id)) or []
    events = [decode_event(fields["event"]) for _, fields in entries]
    last = int(entries[-1][0].partition("-")[0]) if entries else 0
    return JournalPage(read_journal(events), last + 1)


def queue_append(
    pipe: Any, claim: Claim, first_entry: int, events: Sequence[Event], *, clears: bool = True
) -> None:
    """Adds a write of ``events``, as entries from ``first_entry`` on, to a pipeline. ``clears``:
    whether tokens clear the job of deaths that it is blamed for.

    The reply is 0 if the claim was lost. Else it has ``WRITTEN``, and ``CANCEL_REQUESTED`` and
    ``IS_READ`` if they hold. Sending it twice writes the events once.
    """
    queue_script(
        pipe,
        "append",
        [
            claim.job_id,
            claim.fence,
            first_entry,
            int(clears and any(isinstance(each, Tokens | Vectors) for each in events)),
            *(encode_event(event) for event in events),
        ],
    )
