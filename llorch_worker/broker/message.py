"""A job as a Celery task message, the way kombu puts it on a Redis list."""

from __future__ import annotations

import base64
from typing import Any

from celery import Celery
from celery.utils import uuid
from kombu.utils.json import dumps

from llorch_worker.broker.queues import Route
from llorch_worker.contract import TASK_NAME, GenerationRequest

ENQUEUED_AT = "llorch_enqueued_at"
"""Message header: unix time in s at which the job was enqueued."""

_TIME = '"@ENQUEUED_AT@"'


def job_message(
    app: Celery, request: GenerationRequest, *, model: str, job_id: str, to: Route
) -> tuple[str, str]:
    """The message in two parts, between which the time at which it is enqueued belongs.

    Redis puts it there, by its own clock: see ``lua/enqueue.lua``.
    """
    task = app.amqp.as_task_v2(
        job_id,
        TASK_NAME,
        (),
        request.wire() | {"model": model},
        # Celery would put the prompt into the headers, for logs and monitors. What those show of a
        # job its worker finds out for itself.
        argsrepr="()",
        kwargsrepr="{...}",
    )
    message: dict[str, Any] = {
        # The time first: what comes later may hold the same text.
        "headers": {ENQUEUED_AT: _TIME.strip('"')} | task.headers,
        "body": base64.b64encode(dumps(task.body).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "properties": {
            **task.properties,
            "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": to.queue},
            "delivery_mode": 2,
            "delivery_tag": uuid(),
            "priority": to.priority or 0,
        },
    }
    before, _, after = dumps(message).partition(_TIME)
    return before, after


def enqueue_time_s(header: object) -> float | None:
    """The header :data:`ENQUEUED_AT`, which anybody may have written, where it is a time."""
    if isinstance(header, int | float) and not isinstance(header, bool) and header > 0:
        return float(header)
    return None
