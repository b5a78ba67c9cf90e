"""What Celery does after a task's end, for jobs whose worker did not do it.

After it has stored a task's end, a Celery worker counts the task's part of a chord, fails the later
tasks of its chain, calls its errbacks and sends an event. A job may end without a worker: a cancel
ends one that waits, and a claim ends one that has no attempts left. Or its worker dies after it has
stored the end. Redis keeps such jobs in a sorted set until a worker has done the rest.
"""

from __future__ import annotations

import threading
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect
from llorch_worker.broker.message import read_task
from llorch_worker.broker.redis_outage import RedisOutage
from llorch_worker.broker.results import FAILURE, REVOKED, SUCCESS
from llorch_worker.broker.scripts import run_script, text
from llorch_worker.settings import Settings

logger = get_logger(__name__)

AT_ONCE_JOBS = 100
CLOSE_TIMEOUT_S = 2.0


class FollowUps:
    """A thread that looks for such jobs within ``sweep_s``."""

    def __init__(self, app: Celery, settings: Settings, hostname: str) -> None:
        self._app = app
        self._redis = connect(settings.redis_url)
        self._settings = settings
        self._hostname = hostname
        self._outage = RedisOutage("cannot follow up ended jobs", "following up ended jobs again")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llorch-follow-ups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        # While Redis is away, the thread waits for it. Another worker follows up instead.
        self._thread.join(CLOSE_TIMEOUT_S)
        self._redis.close()

    def _run(self) -> None:
        while not self._stop.wait(0.8 * self._settings.sweep_s):
            try:
                while taken := self._take():
                    with self._app.events.default_dispatcher(hostname=self._hostname) as events:
                        for job_id, message, document, fence in taken:
                            self._follow_up(text(job_id), message, document, fence, events)
            except (RedisError, OperationalError) as error:
                self._outage.failed(error)
            else:
                self._outage.over()

    def _take(self) -> list[Any]:
        if not self._redis.exists(keys.FOLLOW_UPS):
            return []
        lease_ms = round(self._settings.lease_s * 1e3)
        taken: list[Any] = run_script(self._redis, "follow_up", [lease_ms, AT_ONCE_JOBS])
        return taken

    def _follow_up(self, job_id: str, message: str, document: str, fence: str, events: Any) -> None:
        task = read_task(message)
        # The result may have expired while no worker was there.
        if task is not None and document:
            headers, body = task
            embed = body[2] if isinstance(body, list) and len(body) == 3 else {}
            request = Context({**headers, **(embed or {}), "id": job_id, "delivery_info": {}})
            try:
                self._end(job_id, request, self._app.backend.decode(document), events)
                if request.chord and self._app.backend.sends_body(request):
                    # Look again when this worker's time for the job is over.
                    return
            except (RedisError, OperationalError):
                raise
            except Exception as error:  # noqa: BLE001 - an errback or a message may raise anything
                logger.error("cannot follow up job %s: %s", job_id, type(error).__name__)
        run_script(self._redis, "followed_up", [job_id, self._settings.result_ttl_s, fence])

    def _end(self, job_id: str, request: Context, meta: dict[str, Any], events: Any) -> None:
        """Does what Celery does after storing ``meta``; the backend stores an end only once."""
        backend, state = self._app.backend, meta["status"]
        if state == SUCCESS and request.chord:
            backend.on_chord_part_return(request, state, meta["result"])
        elif state == FAILURE:
            error = backend.exception_to_python(meta["result"])
            backend.mark_as_failure(job_id, error, request=request)
            events.send("task-failed", uuid=job_id, exception=repr(error))
        elif state == REVOKED:
            backend.mark_as_revoked(job_id, "cancelled", request=request)
            events.send("task-revoked", uuid=job_id, terminated=False, signum=None, expired=False)
