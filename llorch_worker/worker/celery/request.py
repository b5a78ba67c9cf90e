"""A job's request in the worker. It shows no user text, and only the task ends the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery import signals, states
from celery.app.task import Context
from celery.exceptions import BackendError, Ignore, Reject
from celery.worker.request import Request
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from llorch_worker.contract import InternalError, LlorchError, describe, shown, summarise
from llorch_worker.worker.celery.message_faults import NEXT_TASKS


class JobCancelled(Ignore):  # type: ignore[misc]
    """Raised by the task after it stored REVOKED: Celery must store nothing more."""


class JobRequest(Request):  # type: ignore[misc]
    """Celery's request, except that it shows sizes instead of arguments and only the task ends the
    job.

    Logs, events, ``inspect`` and Flower show ``argsrepr`` and ``kwargsrepr``. Stock producers put
    the prompt there, so the worker replaces both with the arguments' sizes. It cuts and escapes the
    other names that a producer chooses. The id stays as it is, because monitors send it back.
    """

    name: str
    _root_id: Any
    _parent_id: Any

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        # For the tracer, which need not decode it then.
        args, kwargs, beside = message.payload
        known = {name: value for name, value in (beside or {}).items() if name in NEXT_TASKS}
        self._body, self._content_type, self._content_encoding = [args, kwargs, known], None, None
        # For a request that ends without the tracer: one that expired or was revoked.
        self._payload = self._body
        self._argsrepr = f"({describe(self._args)})" if self._args else "()"
        self._kwargsrepr = (
            summarise(self._kwargs, self.name)
            if isinstance(self._kwargs, Mapping)
            else describe(self._kwargs)
        )
        # Store the result even if the producer wants none: the stream's last event is stored with
        # it, and a cancel or a second delivery looks for it.
        self._ignore_result = self._request_dict["ignore_result"] = False
        self.name = shown(self.name)
        self._root_id, self._parent_id = map(_shown, (self._root_id, self._parent_id))
        for place in ("exchange", "routing_key", "priority"):
            self._delivery_info[place] = _shown(self._delivery_info[place])
        for name in list(filter(_is_taken, self._request_dict)):
            del self._request_dict[name]
        # The tracer's logs and the events show the headers.
        self._request_dict["argsrepr"] = self._argsrepr
        self._request_dict["kwargsrepr"] = self._kwargsrepr
        self._request_dict["shadow"] = self.name
        self._request_dict["retries"] = _shown(self._request_dict.get("retries", 0))

    def info(self, **_: Any) -> dict[str, Any]:
        """The fields that ``inspect`` and Flower show, without the arguments."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown

    def terminate(self, pool: Any, signal: str | int | None = None) -> None:
        """Cancels the generation. The task then stores REVOKED, unless the job has just finished.
        One thread decides, so a second result never follows the first."""
        if self.time_start:
            pool.terminate_job(self.worker_pid, signal)
        else:
            self._terminate_on_ack = pool, signal

    def cancel(self, pool: Any, *_: Any, **__: Any) -> None:
        """Cold shutdown: stops the generation and returns the job to its queue."""
        if self.time_start:
            pool.hand_back_job(self.worker_pid)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        """Like Celery's, but also reports to monitors that a cancelled job was revoked. They get no
        traceback of an answer: it would lead to code that did its duty."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, LlorchError) and not isinstance(error, InternalError):
            exc_info.traceback = None
        try:
            if not return_ok and not isinstance(error, Ignore | Reject):
                # Celery acknowledges first, which would end the job without a result.
                self.task.backend.store_result(
                    self.id, error, states.FAILURE, request=self._context
                )
            super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        except (RedisError, OperationalError, BackendError, Reject):
            raise
        except Exception:
            # It would fail again: its attempts must count.
            self.message.lapse()
            raise
        finally:
            # Does nothing if the message was settled. Otherwise its claim would stay for ever.
            self.reject(requeue=True)
        if isinstance(error, JobCancelled):
            self.send_event("task-revoked", terminated=True, signum=None, expired=False)
            signals.task_revoked.send(
                self.task, request=self._context, terminated=True, signum=None, expired=False
            )


def _is_taken(header: str) -> bool:
    """Whether the tracer, which makes the headers attributes of the task's request, would replace
    a method or an attribute of its own."""
    return header.startswith("_") or callable(getattr(Context, header, None))


def _shown(value: Any) -> Any:
    """``value`` as events may show it; numbers and None as they are."""
    return value if value is None or isinstance(value, int | float) else shown(value)
