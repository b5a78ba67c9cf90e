"""Jobs that another worker of the model must run: on the weights that began them, or with a larger
context."""

from __future__ import annotations

import random
from collections.abc import Callable

import redis
from celery.utils.log import get_logger

from llorch_worker.broker import claims, registry
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.registry import WorkerCard
from llorch_worker.contract import GenerationRequest, Journal, Restarted

logger = get_logger(__name__)


class OtherWorkers:
    """Hands jobs over to the queues of workers that live; the attempt does not count. All methods
    raise ``RedisError``."""

    def __init__(self, client: redis.Redis, model: str, hostname: str, max_context: int) -> None:
        self._redis = client
        self._model = model
        self._hostname = hostname
        self._max_context = max_context

    def resume(self, claim: Claim, request: GenerationRequest, journal: Journal) -> bool:
        """Hands a job of another model over to a worker of its own; False if none lives that
        holds it."""
        tokens = journal.prompt_tokens + request.least_tokens
        return self._hand_over(
            claim,
            lambda card: card.fingerprint == journal.fingerprint and card.max_context >= tokens,
            "its first tokens are of another model",
        )

    def restart(self, claim: Claim, journal: Journal, entry: int, why: str) -> None:
        """Begins a job again, whose stream then begins with this ``entry``. ``why``: what is wrong
        with its tokens."""
        event = Restarted(worker=self._hostname, attempt=claim.attempt)
        claims.restart(self._redis, claim, entry, event)
        tokens = sum(len(choice.token_ids) for choice in journal.choices.values())
        logger.warning("job %s begins again after %d tokens: %s", claim.job_id, tokens, why)

    def hold(self, claim: Claim, journal: Journal) -> bool:
        """Hands a job over that this worker's context does not hold; False if none has a larger
        one."""
        why = f"it does not fit into {self._max_context} tokens"
        # The worker of another model begins it again.
        return (
            bool(journal)
            and self._hand_over(
                claim,
                lambda card: (
                    card.max_context > self._max_context and card.fingerprint == journal.fingerprint
                ),
                why,
            )
        ) or self._hand_over(claim, lambda card: card.max_context > self._max_context, why)

    def _hand_over(self, claim: Claim, fits: Callable[[WorkerCard], bool], why: str) -> bool:
        others = [
            card
            for card in registry.takers(self._redis, self._model)
            if card.hostname != self._hostname and fits(card)
        ]
        if not others:
            return False
        # Loads are seconds old: many jobs must not go to the one that had the lowest.
        chosen = min(others, key=lambda card: (card.load >= 1, random.random()))
        claims.hand_over(self._redis, claim, chosen.hostname)
        logger.info("job %s goes to %s: %s", claim.job_id, chosen.hostname, why)
        return True
