"""Claimed jobs on their way to Celery, as messages that kombu delivers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from kombu.log import get_logger

from llorch_worker.broker import dead_letters, queues
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.message import ENQUEUED_AT, read_envelope
from llorch_worker.contract import Fault, InvalidRequest

logger = get_logger(__name__)


def deliver(channel: Any, taken: Iterable[Claim], consumed: list[str]) -> None:
    """Delivers what ``channel``, a :class:`.claim_channel.ClaimChannel`, has claimed from the
    ``consumed`` queues."""
    waiting = deque(taken)
    # Hold all before delivering any, so that their leases are renewed.
    for claim in waiting:
        HELD_CLAIMS.add(claim)
    try:
        while waiting:
            _deliver(channel, waiting[0], consumed)
            waiting.popleft()
    finally:
        # Nothing settles a claim whose delivery failed, nor those after it: let their leases
        # lapse. A claim that stayed here would be renewed, and fill a slot, for ever.
        for claim in waiting:
            channel.delivered.pop(claim.tag, None)
            HELD_CLAIMS.discard(claim)


def _deliver(channel: Any, claim: Claim, consumed: list[str]) -> None:
    envelope = read_envelope(claim.message, channel.decode_body)
    if envelope is None:
        _refuse(channel, claim)
        return
    envelope["properties"] |= {"delivery_tag": claim.tag}
    envelope["properties"]["delivery_info"] |= {"redelivered": not claim.first}
    envelope["headers"] = _headers_of(claim, envelope.get("headers") or {})
    channel.delivered[claim.tag] = claim
    # A job from the worker queue or the suspects now belongs to the shared queue.
    queue = queues.queue_of(claim.list_key)
    channel.connection._deliver(envelope, queue if queue in consumed else consumed[0])


def _refuse(channel: Any, claim: Claim) -> None:
    """Fails a job whose message kombu could not deliver, and keeps the message."""
    size = len(claim.message)
    logger.error("refused an entry of %d bytes: it is not a message", size)
    fault = Fault(field="message", rule="must be a Celery message", got=f"{size} bytes")
    with channel.conn_or_acquire() as client:
        error = InvalidRequest.from_faults([fault])
        dead_letters.refuse(client, claim, dead_letters.MALFORMED, error, channel.terms)
    HELD_CLAIMS.discard(claim)


def _headers_of(claim: Claim, headers: dict[str, Any]) -> dict[str, Any]:
    """The message's headers for this claim: Celery need not wait for an ETA that has come, nor end
    a job that expired after its first claim."""
    changed: dict[str, Any] = {}
    if claim.due_ms is not None:
        # Its wait begins with its ETA.
        changed |= {"eta": None, ENQUEUED_AT: claim.due_ms / 1e3}
    if not claim.first:
        changed |= {"expires": None}
    return headers | changed
