"""Cancelling a job, whether it waits, runs, or has ended."""

from __future__ import annotations

from typing import Literal

from redis import Redis

from llorch_worker.broker.results import revoked_document
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import CancelledEvent, encode_event

TOMBSTONE_TTL_S = 30 * 24 * 3600
"""How long a cancelled job is remembered; its message stays in the queue until its turn."""

CancelOutcome = Literal["queued", "running", "ended"]
"""``queued``: the job waited, or its worker had died; it has ended now. ``running``: its worker was
asked and stops within a step. ``ended``: there was nothing to cancel."""


def cancel(client: Redis, job_id: str, *, result_ttl_s: int, stream_ttl_s: int) -> CancelOutcome:
    """Cancels a job. The script decides in one step whether a worker's claim came first.

    A job that nobody claimed looks like one that nobody sent: both end.
    """
    outcome: CancelOutcome = run_script(
        client,
        "cancel",
        [
            job_id,
            revoked_document(job_id),
            encode_event(CancelledEvent()),
            result_ttl_s,
            stream_ttl_s,
            max(TOMBSTONE_TTL_S, result_ttl_s),
        ],
    )
    return outcome
