"""A job as a Celery task message, the way kombu puts it on a Redis list."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from celery import Celery
from celery.utils import uuid
from kombu.utils.json import dumps

from llorch_worker.broker.queues import Route
from llorch_worker.contract import TASK_NAME, GenerationRequest

ENQUEUED_AT = "llorch_enqueued_at"
"""Message header: unix time in s at which the job was enqueued."""

_TIME, _ID, _BODY, _FIELDS = (f"@{name}{uuid()}@" for name in ("time", "id", "body", "fields"))
"""Stand-ins; random, so that no name and no prompt can hold one."""

MOST_FORMS = 256
"""Routes (a model, or one of its workers, at one priority) whose form is kept."""


@dataclass(frozen=True)
class _Form:
    """A message whose job is not filled in yet. A body has its fields between its two parts."""

    before: str
    after: str
    body: tuple[str, str]


class JobMessages:
    """Writes jobs as messages of ``app``.

    Celery makes one for each route, and what differs between jobs is filled in: Celery's own
    way to a message is long, and somebody waits for the job.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._form = lru_cache(MOST_FORMS)(self._make_form)

    def write(
        self, request: GenerationRequest, *, model: str, job_id: str, to: Route
    ) -> tuple[str, str]:
        """The message in two parts, between which the time at which it is enqueued belongs.

        Redis puts it there, by its own clock: see ``lua/enqueue.lua``.
        """
        form = self._form(model, to, os.getpid())
        fields = request.wire_json()
        body = base64.b64encode(fields.join(form.body).encode()).decode()
        return form.before, form.after.replace(_ID, job_id).replace(_BODY, body)

    def _make_form(self, model: str, to: Route, _pid: int) -> _Form:
        """``_pid``: Celery names the process that sends."""
        task = self._app.amqp.as_task_v2(
            _ID,
            TASK_NAME,
            (),
            {_FIELDS: None, "model": model},
            # Celery would put the prompt into the headers, for logs and monitors. What those show
            # of a job its worker finds out for itself.
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
        return _Form(before, after, (head, tail))


def enqueue_time_s(header: object) -> float | None:
    """The header :data:`ENQUEUED_AT`, which anybody may have written, where it is a time."""
    if isinstance(header, int | float) and not isinstance(header, bool) and header > 0:
        return float(header)
    return None
