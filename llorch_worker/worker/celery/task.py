"""``llorch.generate``: validate, hand to the resident engine, return the result."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject

from llorch_worker.broker.message import ENQUEUED_AT, enqueue_time_s
from llorch_worker.broker.queues import Route, route
from llorch_worker.contract import (
    TASK_NAME,
    Cancelled,
    GenerationResult,
    InternalError,
    LlorchError,
    describe,
    summarise,
)
from llorch_worker.worker.celery.request import JobCancelled
from llorch_worker.worker.job_runner import HandedBack
from llorch_worker.worker.residency import Residency


class GenerateTask(Task):  # type: ignore[misc]
    """What ``generate.delay(...)`` of a producer does, and how the worker sees its messages."""

    Request = "llorch_worker.worker.celery.request:JobRequest"

    def __call__(self, /, *args: Any, **fields: Any) -> Any:
        # Celery's own would take a field named "self" for an argument of its own.
        return self.run(*args, **fields)

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Sends the job to the queue of its model and priority, with sizes for Celery's logs."""
        fields = dict(kwargs or {})
        if options.keys().isdisjoint(("queue", "exchange", "routing_key")):
            to = _route(fields, self.app.settings.served_name)
            options["queue"] = to.queue
            options.setdefault("priority", to.priority)
        options["headers"] = {ENQUEUED_AT: time.time()} | (options.get("headers") or {})
        options["argsrepr"] = f"({describe(args)})" if args else "()"
        options["kwargsrepr"] = summarise(fields)
        return super().apply_async(args, fields, **options)


def generate(task: GenerateTask, /, *args: Any, **fields: Any) -> GenerationResult:
    """Runs one job to its end; ``fields`` are those of the contract's GenerationRequest.

    Takes whatever a producer sends, so that what is wrong with it is answered by name and rule.

    Raises:
        LlorchError: refused or failed.
        JobCancelled: cancelled; REVOKED is stored.
        Reject: the worker stops and the job goes back to its queue.
    """
    request = task.request
    if request.eta:
        # Its claim only held it until now.
        task.backend.mark_as_started(request.id, pid=os.getpid(), hostname=request.hostname)
    residency: Residency | None = task.app.residency
    if residency is None:
        raise InternalError("no model is resident in this process; start one with `llorch worker`")
    try:
        return residency.jobs.generate(
            request.id,
            args,
            fields,
            enqueued_at=enqueue_time_s(request.get(ENQUEUED_AT)),
        )
    except Cancelled:
        task.backend.mark_as_revoked(request.id, reason="cancelled", request=request)
        raise JobCancelled("cancelled") from None
    except HandedBack:
        # To whoever comes next, or nowhere, where another worker has it already.
        raise Reject("it goes on elsewhere", requeue=True) from None


def register(app: Celery) -> Task:
    """Adds the task to ``app``."""
    return app.task(
        generate,
        name=TASK_NAME,
        bind=True,
        base=GenerateTask,
        # A refusal is an answer, not a defect: logged in one line, without a traceback.
        throws=(LlorchError,),
        # The worker judges the arguments, and says which rule they break.
        typing=False,
    )


def _route(fields: Mapping[str, Any], default_model: str) -> Route:
    # What is no model or priority travels all the same: the worker names the fault.
    model, priority = fields.get("model"), fields.get("priority")
    return route(
        model if isinstance(model, str) and model else default_model,
        priority if priority in ("high", "low") else "normal",
    )
