"""Claims: which worker holds which job, for how long, and how a claim ends.

A claim is a job's record with state ``claimed``, a lease and a fence. The fence grows whenever the
claim changes hands, and every write for a job names its fence, so a worker that lost its claim
cannot write another token or result. All times are by Redis' own clock.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from kombu.log import get_logger
from redis import Redis
from redis.client import NEVER_DECODE

from llorch_worker.broker import keys, queues
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.jobs.results import (
    decode_state,
    failure_document,
    started_document,
    terminal_event,
)
from llorch_worker.broker.messages.body import is_exit
from llorch_worker.broker.messages.message import most_raw_bytes, reread, unix_ms
from llorch_worker.broker.scripts import Reply, as_bytes, run_script, text
from llorch_worker.contract import AttemptsExhausted, CancelledEvent, Event, Failed, encode_event
from llorch_worker.engine_options import EngineOptions
from llorch_worker.settings import DEAD_LETTERS_BYTES, MAX_MESSAGE_BYTES, Settings

logger = get_logger(__name__)

_ID = "@ID@"
"""The placeholder that ``lua/claim.lua`` replaces with each job's id."""
SWEEP_LIMIT_JOBS = 100
MOST_FENCE_STEP = 2**24
"""In microseconds. Fences that are counted on have random steps of less, so that an older state of
Redis is not counted on to the same ones."""
MOST_CONTEXT = 10**15
"""As in a worker's card."""
CLAIM_VALUES = 14
"""How many ``lua/claim.lua`` returns for each claim."""
_PIECE_BYTES = 2**20
"""Of a large message."""
Kind = Literal["any", "generation", "texts"]
"""Jobs that generate, those that read texts, or both."""
MOST_DEAD_LETTERS = 10_000
"""Beside the bound of their bytes."""


@dataclass(frozen=True)
class ClaimTerms:
    """A worker's limits for its claims."""

    lease_ms: int
    max_attempts: int
    """The most engines that may die in a row while they compute the job, without progress."""
    max_deaths: int
    """The most engines and workers that it may lose in all."""
    result_ttl_s: int
    """Also how long an ended job's record is kept, to recognise a second copy of its message."""
    stream_ttl_s: int
    low_waits_at_most_ms: int = round(EngineOptions.low_waits_at_most_s * 1e3)
    max_message_bytes: int = MAX_MESSAGE_BYTES
    dead_letters_bytes: int = DEAD_LETTERS_BYTES

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            lease_ms=round(settings.lease_s * 1e3),
            max_attempts=settings.max_attempts,
            max_deaths=settings.max_deaths,
            result_ttl_s=settings.result_ttl_s,
            stream_ttl_s=settings.stream_ttl_s,
            low_waits_at_most_ms=round(settings.low_waits_at_most_s * 1e3),
            max_message_bytes=settings.max_message_bytes,
            dead_letters_bytes=settings.dead_letters_bytes,
        )


@dataclass(frozen=True)
class Claim:
    """A job that a worker holds. Times are Unix times by Redis' clock."""

    job_id: str
    message: bytes
    """The list element as the producer pushed it."""
    attempt: int
    """1 for the first claim. Attempts that a drain ended do not count."""
    fence: int
    list_key: str
    suspect: bool
    """It may have killed its last engine."""
    first_claimed_ms: int
    claimed_ms: int
    first: bool = False
    """Whether this is the job's first claim; it then has no journal."""
    cancelled: bool = False
    """Whether a cancel was requested before the claim."""
    due_ms: int | None = None
    """Its ETA, if it had one that can be read."""
    retried_ms: int | None = None
    """When its dead letter was last retried."""
    reads: bool = False
    """Whether it reads texts, and generates none."""
    taken_s: float = field(default_factory=time.monotonic, compare=False)
    """When the claim arrived, by this process' monotonic clock."""

    @cached_property
    def tag(self) -> str:
        """The delivery tag of its message. A producer's own tag may not be unique."""
        return f"{self.job_id}/{self.fence}"

    @cached_property
    def model(self) -> str:
        """The name of the job's model."""
        return queues.model_of(self.list_key)


class Taken(NamedTuple):
    """What one call of :func:`claim` brought."""

    claims: list[Claim]
    look_again_s: float | None
    """When to claim again, without a wake-up; None if there is no need."""
    repeated: list[str]
    """The ids of messages that were dropped because their jobs had ended; the first few."""


@dataclass(frozen=True)
class ClaimRequest:
    """What a worker asks for in one call of :func:`claim`."""

    model: str
    queues: tuple[str, ...]
    """Those that Celery consumes now; others than the model's do not count."""
    limit: int
    worker: str
    """The caller's node name."""
    held: tuple[Claim, ...] = ()
    """The claims that the caller already has."""
    urgent: bool = False
    """Whether the caller has no room and asks for high jobs only."""
    place: str = ""
    """The caller's name in the registry, if jobs may be placed there: see ``fleet/affinity.py``."""
    fingerprint: str = ""
    """What the caller serves: see :attr:`.WorkerCard.fingerprint`."""
    max_context: int = MOST_CONTEXT
    kind: Kind = "any"
    """Which jobs it claims."""
    call: str = field(default_factory=lambda: secrets.token_hex(8))
    """The id of this call."""
    sent_before: bool = False
    """Whether this call was sent before, and its reply was lost: it then gives the same jobs."""


def claim(client: Redis, request: ClaimRequest, terms: ClaimTerms) -> Taken:
    """Claims up to ``request.limit`` jobs of the queues, the most urgent first. Of many jobs it
    takes this worker's share.

    New dead letters are logged. Jobs with an ETA are scheduled, and messages that the script cannot
    read are put back so that it can: then look again at once.

    A ``client`` that itself sends a command again would claim twice: call it again instead.
    """
    model = request.model
    consumed = [name for name in request.queues if queues.model_of(name) == model]
    limit = max(0, request.limit) if consumed else 0
    if not (limit or request.sent_before):
        return Taken([], None, [])
    exhausted = _exhausted(terms)
    # Its claims of texts are calls beside the others.
    suffix = queues.TEXTS_SUFFIX if request.kind == "texts" else ""
    documents = {
        "started": started_document(_ID, request.worker, os.getpid()),
        "failure": failure_document(_ID, exhausted),
        "end_event": encode_event(Failed(error=exhausted.document())),
        "cancel_event": encode_event(CancelledEvent()),
    }
    asked = {
        "worker": request.worker,
        "place": request.place,
        "limit": limit,
        "jobs": len(request.held),
        "suspects_held": [claim.job_id for claim in request.held if claim.suspect],
        "urgent": request.urgent,
        "gone_ms": registry.GONE_AFTER_S * 1000,
        "awaited_ms": registry.AWAITED_S * 1000,
        "lease_ms": terms.lease_ms,
        "max_attempts": terms.max_attempts,
        "fence_step": secrets.randbelow(MOST_FENCE_STEP),
        "max_deaths": terms.max_deaths,
        "keep_s": terms.result_ttl_s,
        "stream_s": terms.stream_ttl_s,
        "letters_bytes": terms.dead_letters_bytes,
        "most_letters": MOST_DEAD_LETTERS,
        "low_waits_ms": terms.low_waits_at_most_ms,
        "call": request.call,
        "call_key": keys.call(queues.place_of(model, request.worker) + suffix),
        "model": model,
        "kind": request.kind,
        "classes": _classes(consumed),
        "fingerprint": request.fingerprint,
        "max_context": request.max_context,
        "sent_before": request.sent_before,
    }
    again_ms, taken, *values = run_script(
        client,
        "claim",
        [json.dumps(asked | documents)],
        queues.inbox(consumed),
    )
    # See ``lua/claim.lua``: the claims, then the messages that were dropped.
    end = taken * CLAIM_VALUES
    repeated = []
    for job_id, outcome in zip(values[end::2], values[end + 1 :: 2], strict=True):
        if text(outcome) == "repeated":
            repeated.append(text(job_id))
        else:
            logger.error("job %s is a dead letter: %s", text(job_id), exhausted.message)
    begun = [values[at : at + CLAIM_VALUES] for at in range(0, end, CLAIM_VALUES)]
    for each in begun:
        if each[1] is None:
            each[1] = _large_message(client, text(each[0]))
    ready, later, unread = _sorted(each for each in begun if each[1] is not None)
    for each in later:
        _release(client, each, "scheduled", due_ms=each.due_ms or 0)
    _reread(client, unread, terms)
    if unread or later:
        again_ms = 0
    return Taken(ready, again_ms / 1e3 if again_ms >= 0 else None, repeated)


def _large_message(client: Redis, job_id: str) -> bytes | None:
    """What ``lua/claim.lua`` leaves for commands of their own; None if somebody has deleted it:
    the claim's lease then lapses. In pieces, between which Redis answers others."""
    pieces: list[bytes] = []
    while not pieces or len(pieces[-1]) == _PIECE_BYTES:
        first = len(pieces) * _PIECE_BYTES
        wanted = ("GETRANGE", keys.message(job_id), first, first + _PIECE_BYTES - 1)
        pieces.append(client.execute_command(*wanted, **{NEVER_DECODE: True}))
    return b"".join(pieces) or None


def _classes(consumed: Iterable[str]) -> dict[str, bool]:
    """The classes of jobs of these queues, as ``lua/parts/names.lua`` numbers them."""
    high = set(map(queues.is_high, consumed))
    return {"0": True in high, "1": False in high, "2": False in high}


def _exhausted(terms: ClaimTerms) -> AttemptsExhausted:
    return AttemptsExhausted(
        f"{terms.max_attempts} attempts without progress, or {terms.max_deaths} in all, ended with "
        "the death of the engine or the worker"
    )


def _sorted(found: Iterable[Sequence[Any]]) -> tuple[list[Claim], list[Claim], list[Claim]]:
    """The claims that ``lua/claim.lua`` returned: those whose jobs can run, those that have not yet
    waited for their ETA, even a past one, and those whose message it could not read."""
    ready, later, unread = [], [], []
    for (
        job_id, message, attempt, fence, list_key, first_claimed_ms, claimed_ms, first, cancelled,
        suspect, eta, retried_ms, is_unread, reads,
    ) in found:  # fmt: skip
        claim = Claim(
            job_id=text(job_id),
            message=as_bytes(message),
            attempt=int(attempt),
            fence=int(fence),
            list_key=text(list_key),
            suspect=bool(suspect),
            first_claimed_ms=int(first_claimed_ms),
            claimed_ms=int(claimed_ms),
            first=bool(first),
            cancelled=bool(cancelled),
            due_ms=eta if eta is None or isinstance(eta, int) else _unix_ms(eta),
            retried_ms=None if retried_ms is None else int(retried_ms),
            reads=bool(reads),
        )
        if is_unread:
            unread.append(claim)
        elif not isinstance(eta, int) and claim.due_ms is not None and not claim.cancelled:
            later.append(claim)
        else:
            ready.append(claim)
    return ready, later, unread


def _unix_ms(eta: Reply) -> int | None:
    try:
        return unix_ms(text(eta))
    except UnicodeDecodeError:
        return None


def _reread(client: Redis, claims: Sequence[Claim], terms: ClaimTerms) -> None:
    """Puts messages back with the id of their job, and buries those that name none."""
    sizes = []
    for claim in claims:
        message = _reread_message(claim.message, terms)
        letter = letter_of(claim, terms)
        known = (claim.job_id, claim.fence, message or "", *letter)
        if run_script(client, "reread", known) and message is None:
            sizes.append(len(claim.message))
    if sizes:
        entries = "an entry" if len(sizes) == 1 else f"{len(sizes)} entries"
        text = "refused %s of %d bytes without a job id; llorch dead list shows more"
        logger.error(text, entries, sum(sizes))


def letter_of(claim: Claim, terms: ClaimTerms) -> tuple[str, int, int, int]:
    """What the scripts that keep a dead letter get: the message as text, empty if it is too large
    to be read, its bytes, and the most bytes and letters in all."""
    raw = claim.message
    keeps = len(raw) <= most_raw_bytes(terms.max_message_bytes)
    text = raw.decode(errors="replace") if keeps else ""
    return text, len(raw), terms.dead_letters_bytes, MOST_DEAD_LETTERS


def _reread_message(raw: bytes, terms: ClaimTerms) -> str | None:
    try:
        return reread(raw, terms.max_message_bytes)
    except BaseException as error:
        if is_exit(error):
            raise
        logger.error("cannot read an entry: %s", type(error).__name__)
        return None


def renew(client: Redis, claims: Sequence[Claim], *, lease_ms: int) -> list[Claim]:
    """Renews the leases of ``claims``; returns the lost ones."""
    pairs = [part for claim in claims for part in (claim.job_id, claim.fence)]
    lost = run_script(client, "renew", [lease_ms, *pairs])
    return [claims[place - 1] for place in lost]


def end(client: Redis, claim: Claim, terms: ClaimTerms) -> bool:
    """Ends a claim without storing a result; False if it was lost or has ended."""
    return _release(client, claim, "ended", terms.result_ttl_s)


def fail(client: Redis, claim: Claim, error: Exception, terms: ClaimTerms) -> bool:
    """Stores ``error`` as the job's result and ends the claim; False if the claim was lost. What
    follows the end is left to :mod:`.follow_ups`."""
    document = failure_document(claim.job_id, error)
    end = decode_state(document).end
    assert end is not None
    return bool(
        run_script(
            client,
            "finish",
            [
                claim.job_id,
                claim.fence,
                document,
                terms.result_ttl_s,
                encode_event(terminal_event(end)),
                terms.stream_ttl_s,
                0,
            ],
        )
    )


def blame(client: Redis, claim: Claim, *, max_attempts: int, alone: bool) -> bool:
    """Puts a job back as a suspect, because its engine died while it computed this job: ``alone``,
    or with others, and then this strike is not its last. The attempt counts. False if the claim
    was lost or has ended."""
    most_strikes = max_attempts if alone else max_attempts - 1
    return _release(client, claim, "blamed", most_strikes=most_strikes)


def lapse(client: Redis, claim: Claim, *, max_attempts: int) -> None:
    """:func:`blame` for a job that its worker cannot take: the next sweep puts it back."""
    _release(client, claim, "lapsed", most_strikes=max_attempts)


def hand_back(
    client: Redis, claim: Claim, *, fingerprint: str = "", least_context: int = 0, place: str = ""
) -> bool:
    """Puts a job back; the attempt does not count. False if the claim was
    lost or has ended.

    If the caller lacks something for it, only a worker that serves the model of this
    ``fingerprint``, if any, and has ``least_context`` claims it from now on. One of the name
    ``place`` in the registry, if any, is woken.
    """
    return _release(client, claim, "waiting", needs=(fingerprint, least_context or "", place))


def restart(client: Redis, claim: Claim, entry: int, event: Event) -> bool:
    """Voids what the job's stream holds, and begins it again with ``event`` as this ``entry``.
    False if the claim was lost."""
    document = encode_event(event)
    return bool(run_script(client, "restart", [claim.job_id, claim.fence, entry, document]))


def restore(client: Redis, claim: Claim) -> bool:
    """:func:`hand_back` for a job that Redis knows nothing of, because it lost its data; False if
    it knows the job. Call it only if the records of the job's end cannot have expired."""
    known = (claim.job_id, claim.fence, claim.attempt - 1, claim.first_claimed_ms, claim.list_key)
    return bool(run_script(client, "restore", [*known, claim.message]))


def _release(
    client: Redis,
    claim: Claim,
    state: str,
    ttl_s: int = 0,
    due_ms: int = 0,
    most_strikes: int = 0,
    needs: tuple[str | int, ...] = (),
) -> bool:
    asked = (claim.job_id, claim.fence, state, ttl_s, due_ms, most_strikes, *needs)
    return bool(run_script(client, "release", asked))


def sweep(client: Redis, *, lease_ms: int) -> list[str]:
    """Puts jobs with lapsed leases back; returns their ids."""
    back: list[str] = []
    while True:
        batch = run_script(client, "sweep", [SWEEP_LIMIT_JOBS, lease_ms])
        back += map(text, batch)
        if len(batch) < SWEEP_LIMIT_JOBS:
            return back
