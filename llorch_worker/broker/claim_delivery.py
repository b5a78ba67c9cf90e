"""Claimed jobs on their way to Celery, as messages that kombu delivers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from kombu.log import get_logger
from kombu.transport import virtual

from llorch_worker.broker import queues
from llorch_worker.broker.body import Unreadable, is_exit
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.message import ENQUEUED_AT, read_envelope

logger = get_logger(__name__)


class DeliveredMessage(virtual.Message):
    """kombu's message; that of a job was read before, within the bounds of :mod:`.body`."""

    size: int
    """Of the body, in bytes."""
    unreadable: str | None
    """Why the body could not be read."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **options: Any) -> None:
        super().__init__(payload, channel, **options)  # type: ignore[no-untyped-call]
        self.size = payload.get("size", len(self.body or ""))
        self.unreadable = payload.get("unreadable")
        self._decoded_cache = payload.get("payload")


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
    envelope = _envelope(claim, channel.terms.max_message_bytes)
    envelope["properties"] |= {"delivery_tag": claim.tag}
    envelope["properties"]["delivery_info"] |= {"redelivered": not claim.first}
    envelope["headers"] = _headers_of(claim, envelope.get("headers") or {})
    channel.delivered[claim.tag] = claim
    # A job from the worker queue or the suspects now belongs to the shared queue.
    queue = queues.queue_of(claim.list_key)
    channel.connection._deliver(envelope, queue if queue in consumed else consumed[0])


def _envelope(claim: Claim, most_bytes: int) -> dict[str, Any]:
    try:
        return read_envelope(claim.message, most_bytes)
    except Unreadable as error:
        why = str(error)
    except BaseException as error:
        if is_exit(error):
            raise
        # A defect. Whoever may be told of it is told no more.
        why = "it cannot be read"
        logger.error("cannot read the message of a job: %s", type(error).__name__)
    # The consumer refuses it. Redis has read the id in its headers, or made one.
    return {
        "headers": {"id": claim.job_id},
        "body": "",
        "properties": {"delivery_info": {"exchange": "", "routing_key": ""}},
        "size": len(claim.message),
        "unreadable": why,
    }


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
