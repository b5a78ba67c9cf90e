"""Cancelling a job, whether it waits, runs, or has ended."""

from __future__ import annotations

from typing import Literal

from redis import Redis

from llorch_worker.broker.results import revoked_document
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import CancelledEvent, encode_event

TOMBSTONE_TTL_S = 30 * 24 * 3600
"""How long a cancelled job is remembered whose message still lies in its queue."""

CancelOutcome = Literal["queued", "running", "ended"]
"""Where the job was. ``queued``, also by a worker that died: it has ended now and runs no more;
``running``: its worker was asked, and stops within a step; ``ended``: nothing was to be cancelled.
"""


def cancel(client: Redis, job_id: str, *, result_ttl_s: int, stream_ttl_s: int) -> CancelOutcome:
    """Cancels the job, in one step with any worker's claim on it.

    A job that nobody ever claimed cannot be told from one that nobody sent: both end.
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
