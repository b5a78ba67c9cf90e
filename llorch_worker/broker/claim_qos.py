"""How claims are settled, and how many a worker holds."""

from __future__ import annotations

from typing import Any

from kombu.log import get_logger
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker import claims, queues
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.redis_outage import RedisOutage

logger = get_logger(__name__)

_SETTLING = RedisOutage("settle jobs")

MOST_URGENT_JOBS = 4
"""How many high jobs a worker holds beyond its room, while it has others to preempt."""


class ClaimQoS(kombu_redis.QoS):
    """Settles claims, in place of kombu's register of unacknowledged messages.

    kombu still handles the messages of other queues (replies to ``inspect``).
    """

    channel: Any
    """A :class:`.claim_channel.ClaimChannel`."""

    def can_consume(self) -> bool:
        """Whether there is room for another job. Jobs that run through a reconnect count too."""
        if self.channel.consumes_jobs:
            return not self.is_full or self.urgent_room > 0
        return bool(super().can_consume())

    @property
    def is_full(self) -> bool:
        """Whether only high jobs may come, to preempt others."""
        return bool(self.prefetch_count) and len(HELD_CLAIMS) >= self.prefetch_count

    @property
    def urgent_room(self) -> int:
        """How many high jobs may come beyond the room for all."""
        held = HELD_CLAIMS.all()
        high = sum(queues.is_high(claim.list_key) for claim in held)
        most = self.prefetch_count + MOST_URGENT_JOBS
        # A high job preempts no other high one.
        return max(0, min(most - len(held), self.prefetch_count - high))

    def append(self, message: Any, delivery_tag: str) -> None:
        if delivery_tag in self.channel.delivered:
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        if not self._settle(delivery_tag, requeue=False):
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not self._settle(delivery_tag, requeue=requeue):
            super().reject(delivery_tag, requeue=requeue)

    def restore_unacked(self, client: Any = None) -> None:  # noqa: ARG002 - kombu's signature
        self._flush()
        # Latest first: each goes to the head, so the earliest ends up in front.
        for delivery_tag in reversed(tuple(self._delivered)):
            self.reject(delivery_tag, requeue=True)
        self._delivered.clear()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: leases and their sweep replace kombu's visibility timeout."""

    def _settle(self, delivery_tag: str, *, requeue: bool) -> bool:
        """Ends the claim; ``False`` if this message was not claimed."""
        claim = self.channel.delivered.pop(delivery_tag, None)
        if claim is None:
            return False
        try:
            if not HELD_CLAIMS.has_ended(claim):
                with self.channel.conn_or_acquire() as client:
                    if requeue:
                        self._hand_back(client, claim)
                    else:
                        claims.end(client, claim, self.channel.terms)
            _SETTLING.over()
        except (NoConnection, NoReply) as error:
            # The lease lapses, and the sweep settles the job.
            _SETTLING.failed(error)
        finally:
            # The slot is freed in any case.
            HELD_CLAIMS.discard(claim)
            # kombu would keep the message until the next one comes.
            self._delivered.pop(delivery_tag, None)
            if self.channel.consuming is not None:
                self.channel.consuming.note_room()
        return True

    def _hand_back(self, client: Any, claim: Claim) -> None:
        terms = self.channel.terms
        # Later, another worker may have ended the job, and what Redis knew of it may have expired.
        known_s = terms.lease_ms / 1e3 + terms.result_ttl_s
        if (
            not claims.hand_back(client, claim)
            and HELD_CLAIMS.unrenewed_s(claim) < known_s
            and claims.restore(client, claim)
        ):
            logger.warning("Redis lost its data; job %s is queued again", claim.job_id)
