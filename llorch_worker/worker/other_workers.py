"""Jobs that another worker of the model must run: on the weights that began them, or with a larger
context."""

from __future__ import annotations

import random
from collections.abc import Callable

import redis
from celery.utils.log import get_logger

from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.queues import place_of
from llorch_worker.contract import GenerationRequest, JobRequest, Journal, Restarted

logger = get_logger(__name__)


class OtherWorkers:
    """Puts jobs back that need what this worker has not; the attempt does not count. All methods
    raise ``RedisError``."""

    def __init__(self, client: redis.Redis, model: str, hostname: str, max_context: int) -> None:
        self._redis = client
        self._model = model
        self._hostname = hostname
        self._max_context = max_context

    def resume(self, claim: Claim, request: JobRequest, journal: Journal) -> bool:
        """Leaves a job of another model to the workers of its own; False if none lives that holds
        it."""
        # A model of vectors has seen that each text fits.
        tokens = 0
        if isinstance(request, GenerationRequest):
            tokens = journal.prompt_tokens + request.least_tokens
        return self._leave_to_others(
            claim,
            lambda card: card.fingerprint == journal.fingerprint and card.max_context >= tokens,
            "its first tokens are of another model",
            fingerprint=journal.fingerprint or "",
            least_context=tokens,
        )

    def restart(self, claim: Claim, journal: Journal, entry: int, why: str) -> None:
        """Begins a job again, whose stream then begins with this ``entry``. ``why``: what is wrong
        with its tokens."""
        event = Restarted(worker=self._hostname, attempt=claim.attempt)
        claims.restart(self._redis, claim, entry, event)
        tokens = sum(len(choice.token_ids) for choice in journal.choices.values())
        what = f"{journal.computed} texts" if journal.vectors else f"{tokens} tokens"
        logger.warning("job %s begins again after %s: %s", claim.job_id, what, why)

    def hold(self, claim: Claim) -> bool:
        """Leaves a job that this worker's context does not hold to those with a larger one, which
        may be restarting; False if there was none in the last minutes."""
        least = self._max_context + 1
        if registry.largest_context(self._redis, self._model, registry.AWAITED_S) < least:
            return False
        why = f"it does not fit into {self._max_context} tokens"
        if not self._leave_to_others(
            claim, lambda card: card.max_context >= least, why, least_context=least
        ):
            claims.hand_back(self._redis, claim, least_context=least)
            logger.warning("job %s waits for a worker with a larger context: %s", claim.job_id, why)
        return True

    def _leave_to_others(
        self,
        claim: Claim,
        fits: Callable[[WorkerCard], bool],
        why: str,
        *,
        fingerprint: str = "",
        least_context: int,
    ) -> bool:
        others = [
            card
            for card in registry.takers(self._redis, self._model)
            if card.hostname != self._hostname and fits(card)
        ]
        if not others:
            return False
        # Loads are seconds old: many jobs must not go to the one that had the lowest.
        chosen = min(others, key=lambda card: (card.load >= 1, random.random()))
        claims.hand_back(
            self._redis,
            claim,
            fingerprint=fingerprint,
            least_context=least_context,
            place=place_of(self._model, chosen.hostname),
        )
        logger.info("job %s waits for such as %s: %s", claim.job_id, chosen.hostname, why)
        return True
