"""A claimed job as the message that Celery's strategies get."""

from __future__ import annotations

from typing import Any

from celery.utils.log import get_logger
from kombu.message import Message

from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.settling import Settler
from llorch_worker.broker.messages.body import Unreadable, is_exit
from llorch_worker.broker.messages.message import ENQUEUED_AT, read_envelope, unix_ms

logger = get_logger(__name__)


class JobMessage(Message):
    """kombu's message. Its body was read within the bounds of ``broker/messages/body.py``, and its
    end is that of its claim."""

    size: int
    """Of the body, in bytes."""
    unreadable: str | None
    """Why the body could not be read."""

    def __init__(self, claim: Claim, settler: Settler, most_bytes: int) -> None:
        envelope = _envelope(claim, most_bytes)
        properties = envelope["properties"] | {"delivery_tag": claim.tag}
        super().__init__(  # type: ignore[no-untyped-call]
            body=envelope["body"],
            delivery_tag=claim.tag,
            content_type=envelope.get("content-type"),
            content_encoding=envelope.get("content-encoding"),
            delivery_info=properties["delivery_info"] | {"redelivered": not claim.first},
            properties=properties,
            headers=_headers_of(claim, envelope.get("headers") or {}),
        )
        self.claim, self._settler = claim, settler
        self.size = envelope["size"]
        self.unreadable = envelope.get("unreadable")
        self._decoded_cache = envelope.get("payload")

    def ack(self, multiple: bool = False) -> None:  # noqa: ARG002 - kombu's signature
        self._note_end("ACK")
        self._settler.end(self.claim)

    def reject(self, requeue: bool = False) -> None:
        self._note_end("REJECTED")
        (self._settler.hand_back if requeue else self._settler.end)(self.claim)

    def requeue(self) -> None:
        self.reject(requeue=True)

    def lapse(self) -> None:
        """Has the job run again after the next sweep, if it is not settled; the attempt counts."""
        self._settler.lapse(self.claim)

    def _note_end(self, state: str) -> None:
        if self.acknowledged:
            raise self.MessageStateError(f"the claim {self.delivery_tag} has ended")
        self._state = state


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
    due_ms = _due_ms(claim, headers)
    if due_ms is not None:
        # Its wait begins with its ETA.
        changed |= {"eta": None, ENQUEUED_AT: due_ms / 1e3}
    if not claim.first:
        changed |= {"expires": None}
    return headers | changed


def _due_ms(claim: Claim, headers: dict[str, Any]) -> int | None:
    """The job's ETA, if it had one that can be read. Where a restore or a retry made a new record,
    only the message has it, and it has come."""
    eta = headers.get("eta")
    if claim.due_ms is None and not claim.first and isinstance(eta, str):
        return unix_ms(eta)
    return claim.due_ms
