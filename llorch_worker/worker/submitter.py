"""From what a producer sent to a generation in the engine."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.claims import Claim
from llorch_worker.contract import (
    Event,
    Fault,
    GenerationRequest,
    InternalError,
    InvalidRequest,
    Journal,
    LlorchError,
    OutOfMemory,
    describe,
)
from llorch_worker.worker.resident_engine import ResidentEngine, ResidentGeneration

logger = get_logger(__name__)


class Submitter:
    """Checks jobs and submits them, on whatever thread; a defect ends its job and no other."""

    def __init__(
        self, engine: ResidentEngine, client: redis.Redis, *, hostname: str, key_ttl_s: int
    ) -> None:
        """``key_ttl_s``: how long idempotency keys are remembered."""
        self._engine = engine
        self._redis = client
        self._hostname = hostname
        self._key_ttl_s = key_ttl_s

    def submit(
        self,
        claim: Claim,
        arguments: Sequence[Any],
        fields: Mapping[str, Any],
        enqueued_at: float | None,
        journal: Journal,
        on_event: Callable[[Event], None],
    ) -> ResidentGeneration:
        """Submits one claimed job, given as the arguments of its task.

        ``enqueued_at``: unix time in s at which the producer sent it, where that is known.
        ``journal``: what its earlier attempts told.

        Raises:
            LlorchError: the job is refused.
        """
        try:
            request = _request(arguments, fields)
            self._check_idempotency(request, claim.job_id)
            return self._engine.submit(
                request,
                job_id=claim.job_id,
                worker=self._hostname,
                attempt=claim.attempt,
                queued_at=_queued_at(claim, enqueued_at),
                journal=journal,
                on_event=on_event,
            )
        except LlorchError:
            raise
        except MemoryError:
            raise OutOfMemory("the worker had no memory for this job") from None
        except BaseException as error:  # noqa: BLE001 - any defect must end its job
            # Its message may quote the prompt, so only type and place are shown.
            place = "".join(traceback.format_tb(error.__traceback__))
            logger.error("job %s met a defect: %s\n%s", claim.job_id, type(error).__name__, place)
            raise InternalError(f"a defect of the worker: {type(error).__name__}") from None

    def _check_idempotency(self, request: GenerationRequest, job_id: str) -> None:
        """Our client never sends a second job for a key; what another producer sends is refused."""
        if request.idempotency_key is None:
            return
        key = keys.idempotency(self._engine.model_name, request.idempotency_key)
        try:
            if self._redis.set(key, job_id, nx=True, ex=self._key_ttl_s):
                return
            first = str(self._redis.get(key) or job_id)
        except RedisError:
            return
        if first != job_id:
            fault = Fault(
                field="idempotency_key", rule=f"was used by job {first}", got="the same key again"
            )
            raise InvalidRequest.from_faults([fault])


def _request(arguments: Sequence[Any], fields: Mapping[str, Any]) -> GenerationRequest:
    if arguments:
        fault = Fault(
            field="args", rule="must be empty: fields go by name", got=describe(arguments)
        )
        raise InvalidRequest.from_faults([fault])
    return GenerationRequest(**fields)


def _queued_at(claim: Claim, enqueued_at: float | None) -> float:
    """When the job was enqueued, as unix time in s of this machine's clock.

    The wait is measured on Redis' clock, so that a worker whose own is off neither cuts deadlines
    short nor stretches them. Where a producer did not say when, the first claim counts.
    """
    claimed_s = claim.claimed_ms / 1e3
    since_s = claim.first_claimed_ms / 1e3 if enqueued_at is None else enqueued_at
    return time.time() - max(0.0, claimed_s - since_s)
