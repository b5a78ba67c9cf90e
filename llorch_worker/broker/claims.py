"""Claims: which worker holds which job, for how long, and how a claim ends.

A claim is a job's record with state ``claimed``, a lease and a fence. The fence grows whenever the
claim changes hands, and every write for a job names the fence it is made under, so a worker that
lost its claim cannot write another token or result. All times are Redis' own clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

from kombu.log import get_logger
from redis import Redis

from llorch_worker.broker.results import failure_document, now, started_document
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import AttemptsExhausted, Failed, LlorchError, encode_event

logger = get_logger(__name__)

_ID, _NOW = "@ID@", "@NOW@"
SWEEP_LIMIT_JOBS = 100
MOST_DEAD_LETTERS = 10_000
"""The oldest beyond these are forgotten."""


@dataclass(frozen=True)
class ClaimTerms:
    """The terms on which a worker claims."""

    lease_ms: int
    max_attempts: int
    result_ttl_s: int
    """Also how long the record of an ended job guards against a second copy of its message."""
    stream_ttl_s: int


@dataclass(frozen=True)
class Claim:
    """One job in a worker's hands."""

    job_id: str
    message: bytes
    """The list element as the producer pushed it."""
    attempt: int
    """Counted: 1 for the first claim; a drain's attempt does not count."""
    fence: int
    list_key: str
    suspect: bool
    """Its last worker died before the job made any progress."""
    first_claimed_ms: int
    """Unix time of the first claim, by Redis' clock."""
    claimed_ms: int
    """Unix time of this claim, by Redis' clock."""
    first: bool = False
    """Nobody claimed it before: it has no journal."""
    cancelled: bool = False
    """A cancel was asked for before it was claimed."""
    taken_s: float = field(default_factory=time.monotonic, compare=False)
    """When the claim came here, by this process' monotonic clock."""

    @property
    def redelivered(self) -> bool:
        return self.attempt > 1


@dataclass(frozen=True)
class _Templates:
    """Documents that ``lua/claim.lua`` completes. The same for every claim of a worker, and made
    while a job waits: so once."""

    started: str
    error: AttemptsExhausted
    failure: str
    last_event: str


@cache
def _templates(worker: str, pid: int, max_attempts: int) -> _Templates:
    error = AttemptsExhausted(f"each of {max_attempts} attempts ended with the death of its worker")
    return _Templates(
        started=started_document(_ID, worker, pid),
        error=error,
        failure=failure_document(_ID, error, date_done=_NOW),
        last_event=encode_event(Failed(error=error.document())),
    )


def claim(
    client: Redis,
    *,
    lists: Sequence[str],
    suspects: str,
    held: Iterable[Claim],
    limit: int,
    worker: str,
    terms: ClaimTerms,
) -> list[Claim]:
    """Take up to ``limit`` jobs: a suspect if that endangers nobody, then from ``lists`` in order.

    ``held`` are the claims that the caller has already. What became a dead letter on the way is
    logged, the first few one by one: no claim tells of it.
    """
    held = tuple(held)
    suspect_held = next((claim.job_id for claim in held if claim.suspect), "")
    templates = _templates(worker, os.getpid(), terms.max_attempts)
    answer = iter(
        run_script(
            client,
            "claim",
            [
                worker,
                limit,
                suspect_held,
                terms.lease_ms,
                terms.max_attempts,
                terms.result_ttl_s,
                terms.stream_ttl_s,
                MOST_DEAD_LETTERS,
                templates.started,
                templates.failure.replace(_NOW, now()),
                templates.last_event,
                *(claim.job_id for claim in held if claim.redelivered),
            ],
            [suspects, *lists],
        )
    )
    taken = [_claim_of(answer) for _ in range(next(answer))]
    told, untold, untold_bytes = islice(answer, 3)
    for _ in range(told):
        job_id, size = islice(answer, 2)
        if job_id:
            logger.error("job %s is a dead letter: %s", _text(job_id), templates.error.message)
        else:
            logger.error(
                "refused an entry of %d bytes: it names no job; llorch dead list shows it", size
            )
    if untold:
        logger.error(
            "%d more entries, of %d bytes together, are dead letters: see llorch dead list",
            untold,
            untold_bytes,
        )
    return taken


def _claim_of(answer: Iterator[Any]) -> Claim:
    """The next claim in the answer of ``lua/claim.lua``."""
    job_id, message, attempt, fence, list_key, first_ms, now_ms, first, cancelled, suspect = islice(
        answer, 10
    )
    return Claim(
        job_id=_text(job_id),
        message=message.encode() if isinstance(message, str) else message,
        attempt=int(attempt),
        fence=int(fence),
        list_key=_text(list_key),
        suspect=bool(int(suspect)),
        first_claimed_ms=int(first_ms),
        claimed_ms=int(now_ms),
        first=bool(int(first)),
        cancelled=bool(int(cancelled)),
    )


def renew(client: Redis, claims: Iterable[Claim], *, lease_ms: int) -> list[str]:
    """Renew the leases of ``claims``; returns the ids of those that are lost."""
    pairs = [part for claim in claims for part in (claim.job_id, claim.fence)]
    lost = run_script(client, "renew", [lease_ms, *pairs])
    return [_text(job_id) for job_id in lost]


def end(client: Redis, claim: Claim, terms: ClaimTerms) -> bool:
    """End a claim whose job is over without a result of ours; False if it was no longer ours."""
    return _release(client, claim, "ended", terms.result_ttl_s)


def fail(client: Redis, claim: Claim, error: LlorchError, terms: ClaimTerms) -> bool:
    """Store ``error`` as the job's result, end its stream and the claim; False if it was lost."""
    return bool(
        run_script(
            client,
            "finish",
            [
                claim.job_id,
                claim.fence,
                failure_document(claim.job_id, error),
                terms.result_ttl_s,
                encode_event(Failed(error=error.document())),
                terms.stream_ttl_s,
            ],
        )
    )


def lapse(client: Redis, claim: Claim) -> None:
    """End the claim's lease now, as the worker's death would: the next sweep puts the job back,
    with a counted attempt. Nothing happens where the claim was lost already."""
    run_script(client, "lapse", [claim.job_id, claim.fence])


def hand_back(client: Redis, claim: Claim) -> bool:
    """Put a job back to the head of its queue, without a counted attempt."""
    return _release(client, claim, "queued", 0)


def _release(client: Redis, claim: Claim, state: str, ttl_s: int) -> bool:
    return bool(run_script(client, "release", [claim.job_id, claim.fence, state, ttl_s]))


def sweep(client: Redis) -> list[str]:
    """Put the jobs whose leases lapsed back to the head of their queues; returns their ids."""
    back = run_script(client, "sweep", [SWEEP_LIMIT_JOBS])
    return [_text(job_id) for job_id in back]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
