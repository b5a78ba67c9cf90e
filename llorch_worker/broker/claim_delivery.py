"""Claimed jobs on their way to Celery, as messages that kombu delivers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from llorch_worker.broker import queues
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.message import ENQUEUED_AT, read_envelope


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
    envelope = read_envelope(claim.message, channel.decode_body) or _no_message(claim)
    envelope["properties"] |= {"delivery_tag": claim.tag}
    envelope["properties"]["delivery_info"] |= {"redelivered": not claim.first}
    envelope["headers"] = _headers_of(claim, envelope.get("headers") or {})
    channel.delivered[claim.tag] = claim
    # A job from the worker queue or the suspects now belongs to the shared queue.
    queue = queues.queue_of(claim.list_key)
    channel.connection._deliver(envelope, queue if queue in consumed else consumed[0])


def _no_message(claim: Claim) -> dict[str, Any]:
    """For an entry that kombu could not deliver: the consumer refuses it, as it names no task."""
    properties = {"delivery_info": {"exchange": "", "routing_key": ""}}
    return {"headers": {"id": claim.job_id}, "body": claim.message, "properties": properties}


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
