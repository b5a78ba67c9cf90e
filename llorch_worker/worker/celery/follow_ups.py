"""What Celery does after a task's end, for jobs whose worker did not do it.

After it has stored a task's end, a Celery worker counts the task's part of a chord, fails the later
tasks of its chain, calls its errbacks and sends an event. A job may end without a worker: a cancel
ends one that waits, and a claim ends one that has no attempts left. Or its worker dies after it has
stored the end. Or its message cannot become a task. Redis keeps such jobs in a sorted set until a
worker has done the rest.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError
from redis.exceptions import DataError, RedisError

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.jobs import follow_ups
from llorch_worker.broker.jobs.follow_ups import FollowUp
from llorch_worker.broker.jobs.results import FAILURE, REVOKED, SUCCESS
from llorch_worker.broker.messages.body import read_typed
from llorch_worker.broker.messages.message import read_task
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.message_faults import usable

logger = get_logger(__name__)


class FollowUps(Repeater):
    """A thread that looks for such jobs within ``sweep_s``."""

    def __init__(self, app: Celery, settings: Settings, hostname: str) -> None:
        self._app = app
        self._redis = connect(settings.redis_url)
        self._settings = settings
        self._hostname = hostname
        super().__init__("follow-ups", "follow up ended jobs", self._look, 0.8 * settings.sweep_s)

    def close(self) -> None:
        super().close()
        self._redis.close()

    def _look(self) -> None:
        while taken := follow_ups.take(self._redis, self._settings.lease_s):
            with self._app.events.default_dispatcher(hostname=self._hostname) as events:
                for ended in taken:
                    self._follow_up(ended, events)

    def _follow_up(self, ended: FollowUp, events: Any) -> None:
        # Of a message that cannot be read, the id is all that Celery needs.
        task = read_task(ended.message, self._settings.max_message_bytes, read_typed)
        headers, body = task or ({}, None)
        # The result may have expired while no worker was there.
        if ended.document:
            embed = body[2] if isinstance(body, list) and len(body) == 3 else None
            beside = embed if isinstance(embed, dict) else {}
            try:
                fields = usable(headers) | usable(beside)
                request = Context({**fields, "id": ended.job_id, "delivery_info": {}})
                meta = self._app.backend.decode(ended.document)
                self._end(ended.job_id, request, meta, events)
                if request.chord and self._app.backend.sends_body(request):
                    # Look again when this worker's time for the job is over.
                    return
            except (RedisError, OperationalError) as error:
                # Of what a message holds, not of Redis.
                if not isinstance(error, DataError):
                    raise
                logger.error("cannot follow up job %s: %s", ended.job_id, type(error).__name__)
            except Exception as error:  # noqa: BLE001 - an errback or a message may raise anything
                logger.error("cannot follow up job %s: %s", ended.job_id, type(error).__name__)
        keep_s = self._settings.result_ttl_s
        follow_ups.note_done(self._redis, ended.job_id, keep_s, ended.fence)

    def _end(self, job_id: str, request: Context, meta: dict[str, Any], events: Any) -> None:
        """Does what Celery does after storing ``meta``; the backend stores an end only once."""
        backend, state = self._app.backend, meta["status"]
        if state == SUCCESS and request.chord:
            backend.on_chord_part_return(request, state, meta["result"])
        elif state == FAILURE:
            error = backend.exception_to_python(meta["result"])
            # First, because what its message holds may raise.
            events.send("task-failed", uuid=job_id, exception=repr(error))
            backend.mark_as_failure(job_id, error, request=request)
            for each in request.chain or ():
                # Celery counts no part of a chord whose end was stored before, and whoever was cut
                # off may have stored it without counting it. A part counts once.
                part = Context(each)
                part.update(part.options)
                part.id, part.group = part.options.get("task_id"), part.options.get("group_id")
                if part.chord:
                    backend.on_chord_part_return(part, state, error)
        elif state == REVOKED:
            backend.mark_as_revoked(job_id, "cancelled", request=request)
            events.send("task-revoked", uuid=job_id, terminated=False, signum=None, expired=False)
