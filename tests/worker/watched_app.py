"""The toy worker without a garbage collector, which logs when a part of a job is freed.

The parts are its claim with the raw message, its fields, Celery's request and the contract's.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from celery.utils.log import get_logger

from llorch_worker.contract import GenerationRequest
from llorch_worker.worker.celery import job_message
from llorch_worker.worker.celery.consumer import JobConsumer
from llorch_worker.worker.celery.request import JobRequest
from llorch_worker.worker.celery.task import JobTask
from llorch_worker.worker.claimer import Claimer
from llorch_worker.worker.delivery import Delivery
from tests.toy_app import app as app

gc.disable()
logger = get_logger(__name__)


class Fields(dict[str, Any]):
    """Unlike a dict, it can be watched."""


def watch(part: Any, job_id: str) -> None:
    what = f"a {type(part).__name__} of job {job_id}"
    logger.info("made %s", what)
    weakref.finalize(part, logger.info, "freed %s", what)


def _read_envelope(raw: bytes, most_bytes: int) -> dict[str, Any]:
    read = _really_read(raw, most_bytes)
    match read.get("payload"):
        case [_, dict() as kwargs, _] as payload:
            payload[1] = Fields(kwargs)
            watch(payload[1], read["headers"]["id"])
    return read


def _take(consumer: JobConsumer, claimer: Claimer) -> None:
    watch(claimer.arrived[0], claimer.arrived[0].job_id)
    _really_take(consumer, claimer)


def _request(delivery: Delivery) -> GenerationRequest:
    request = _really_request(delivery)
    watch(request, delivery.claim.job_id)
    return request


class WatchedRequest(JobRequest):
    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        watch(self, self.id)


_really_read, job_message.read_envelope = job_message.read_envelope, _read_envelope
_really_take = JobConsumer._take
JobConsumer._take = _take  # type: ignore[method-assign]
_really_request = Delivery.request
Delivery.request = _request  # type: ignore[method-assign]
JobTask.Request = f"{__name__}:{WatchedRequest.__name__}"
