"""A job as a Celery task message, the way kombu puts it on a Redis list."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from celery import Celery
from celery.utils import uuid
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads

from llorch_worker.broker.queues import Route
from llorch_worker.contract import TASK_NAME, GenerationRequest

ENQUEUED_AT = "llorch_enqueued_at"
"""Message header: unix time in s at which the job was enqueued."""

MOST_TEMPLATES = 256
"""Routes (a model, or one of its workers, at one priority) whose template is kept."""

_TIME, _ID, _BODY, _FIELDS = (f"@{name}{uuid()}@" for name in ("time", "id", "body", "fields"))
"""Stand-ins; random, so that no name and no prompt can hold one."""
_UNREADABLE = (
    binascii.Error, LookupError, TypeError, ValueError, AttributeError, RecursionError
)  # fmt: skip


@dataclass(frozen=True)
class _Template:
    """A message without its job. The fields go between the two parts of ``body``."""

    before: str
    after: str
    body: tuple[str, str]


class JobMessages:
    """Writes jobs as messages of ``app``.

    Celery makes one template for each route, which then serves every job: Celery's own way to a
    message is long, and somebody waits for the job.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._template = lru_cache(MOST_TEMPLATES)(self._make_template)

    def write(
        self, request: GenerationRequest, *, model: str, job_id: str, to: Route
    ) -> tuple[str, str]:
        """The message in two parts, which the time of enqueueing joins.

        Redis puts it there, by its own clock: see ``lua/enqueue.lua``.
        """
        template = self._template(model, to, os.getpid())
        fields = request.wire_json()
        body = base64.b64encode(fields.join(template.body).encode()).decode()
        return template.before, template.after.replace(_ID, job_id).replace(_BODY, body)

    def _make_template(self, model: str, to: Route, _pid: int) -> _Template:
        """``_pid``: Celery names the process that sends."""
        task = self._app.amqp.as_task_v2(
            _ID,
            TASK_NAME,
            (),
            {_FIELDS: None, "model": model},
            # Celery would put the prompt into the headers, for logs and monitors. The worker finds
            # out for itself what those show of a job.
            argsrepr="()",
            kwargsrepr="{...}",
        )
        message: dict[str, Any] = {
            # The time first: nothing before it differs between jobs.
            "headers": {ENQUEUED_AT: _TIME} | task.headers,
            "body": _BODY,
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "properties": {
                **task.properties,
                "body_encoding": "base64",
                "delivery_info": {"exchange": "", "routing_key": to.queue},
                "delivery_mode": 2,
                "delivery_tag": _ID,
                "priority": to.priority or 0,
            },
        }
        before, after = dumps(message).split(f'"{_TIME}"')
        head, tail = dumps(task.body).split(f'"{_FIELDS}": null')
        return _Template(before, after, (head, tail))


def read_envelope(raw: bytes, decode_body: Callable[[Any, Any], Any]) -> dict[str, Any] | None:
    """The message as kombu's envelope, its body decoded; None if it is not a message."""
    try:
        envelope: Any = loads(bytes_to_str(raw))
        # What delivery and acknowledgement read, read once here, where an error is harmless.
        properties, headers = envelope["properties"], envelope.get("headers")
        info = properties["delivery_info"]
        names = (properties["delivery_tag"], info["exchange"], info["routing_key"])
        body = envelope.get("body")
        if body:
            body = decode_body(body, properties.get("body_encoding"))
    except _UNREADABLE:
        return None
    if not all(isinstance(each, dict) for each in (envelope, properties, headers or {})):
        return None
    if not all(isinstance(name, str) for name in names):
        return None
    return {**envelope, "body": body, "properties": {**properties, "body_encoding": None}}


def enqueue_time_s(header: object) -> float | None:
    """The header :data:`ENQUEUED_AT` if it is a time; anybody may have written it."""
    if isinstance(header, int | float) and not isinstance(header, bool) and header > 0:
        return float(header)
    return None
