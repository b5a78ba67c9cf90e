"""How a worker ends its claims, over a connection that outlives that for control commands."""

from __future__ import annotations

from collections.abc import Callable

from kombu.log import get_logger
from redis import Redis
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimTerms
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS

logger = get_logger(__name__)


class Settler:
    """Ends claims, and frees their slots in any case. Other errors of Redis than an outage are
    raised."""

    def __init__(self, client: Redis, terms: ClaimTerms, on_room: Callable[[], object]) -> None:
        """``on_room`` is called when a slot is free."""
        self._redis = client
        self._terms = terms
        self._on_room = on_room
        self._outage = RedisOutage("settle jobs")

    def end(self, claim: Claim) -> None:
        """Ends a claim whose result is stored, or whose job shall have none."""
        self._settle(claim, lambda: claims.end(self._redis, claim, self._terms))

    def hand_back(self, claim: Claim) -> None:
        """Returns the job to its queue; the attempt does not count."""
        self._settle(claim, lambda: self._hand_back(claim))

    def lapse(self, claim: Claim) -> None:
        """Has the job run again after the next sweep, if it is not settled. The attempt counts. The
        slot stays taken."""
        if HELD_CLAIMS.get(claim.tag) is not None:
            claims.lapse(self._redis, claim, max_attempts=self._terms.max_attempts)

    def _settle(self, claim: Claim, settle: Callable[[], object]) -> None:
        try:
            if not HELD_CLAIMS.has_ended(claim):
                settle()
            self._outage.over()
        except (NoConnection, NoReply) as error:
            # The lease lapses, and the sweep settles the job.
            self._outage.failed(error)
        finally:
            HELD_CLAIMS.discard(claim)
            self._on_room()

    def _hand_back(self, claim: Claim) -> None:
        # Later, another worker may have ended the job, and what Redis knew of it may have expired.
        known_s = self._terms.lease_ms / 1e3 + self._terms.result_ttl_s
        if (
            not claims.hand_back(self._redis, claim)
            and HELD_CLAIMS.unrenewed_s(claim) < known_s
            and claims.restore(self._redis, claim)
        ):
            logger.warning("Redis lost its data; job %s is queued again", claim.job_id)
