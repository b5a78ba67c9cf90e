"""``llorch.generate`` and the tasks of texts: hands a job to the resident engine and returns its
result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject

from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.messages.message import ENQUEUED_AT, TENANT, enqueue_time_s
from llorch_worker.contract import (
    REQUESTS,
    Cancelled,
    Fault,
    InternalError,
    InvalidRequest,
    JobResult,
    LlorchError,
    describe,
    summarise,
)
from llorch_worker.contract.plain_objects import mark_plain
from llorch_worker.telemetry.traces.publishing import carried
from llorch_worker.worker.celery.request import JobCancelled, JobRequest
from llorch_worker.worker.delivery import Delivery
from llorch_worker.worker.job_runner import HandedBack
from llorch_worker.worker.residency import Residency


class JobTask(Task):  # type: ignore[misc]
    """The base of every task of the app, Celery's own included: ``celery.map`` may hold prompts."""

    Request = JobRequest


class RequestTask(JobTask):
    """Sends jobs for ``generate.delay(...)`` in a producer, and runs them in a worker."""

    def __call__(self, /, *args: Any, **fields: Any) -> Any:
        # Celery's own method would take a field named "self" for its own argument.
        return self.run(*args, **fields)

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Celery's logs show sizes only. The app's router chooses the queue."""
        fields = dict(kwargs or {})
        # A worker sends on the next task of a chain, which has the marks that its producer gave it.
        if self.app.residency is None:
            fields = mark_plain(fields)
        own = {ENQUEUED_AT: time.time(), **carried()}
        options["headers"] = own | (options.get("headers") or {})
        options["argsrepr"] = f"({describe(args)})" if args else "()"
        options["kwargsrepr"] = summarise(fields, self.name)
        return super().apply_async(args, fields, **options)


def run(task: RequestTask, /, *args: Any, **fields: Any) -> JobResult:
    """Runs one job to its end; ``fields`` are those of the contract's request for this task.

    It accepts any arguments, so that the error for a wrong one gives its name and the broken rule.

    Raises:
        LlorchError: the job is refused or failed.
        JobCancelled: it is cancelled; REVOKED is stored.
        Reject: the worker stops and the job goes back to its queue.
    """
    request = task.request
    residency: Residency | None = task.app.residency
    if residency is None:
        raise InternalError("no model is resident in this process; start one with `llorch worker`")
    if not request.properties:
        # celery.map, starmap and chunks call the task inside their own.
        rule = "must be a job of its own: send a group of jobs instead of map, starmap or chunks"
        raise InvalidRequest.from_faults(
            [Fault(field="task", rule=rule, got="a call in another task")]
        )
    claim = HELD_CLAIMS.get(request.properties["delivery_tag"])
    if claim is None:
        raise Reject("its claim was given up; the job is delivered again", requeue=True)
    enqueued_at_s = enqueue_time_s(request.get(ENQUEUED_AT))
    try:
        return residency.runner_of(claim).run(
            Delivery(
                claim,
                fields,
                task.name,
                args,
                enqueued_at_s,
                request.timelimit or (),
                request.get(TENANT),
            )
        )
    except Cancelled:
        task.backend.mark_as_revoked(request.id, reason="cancelled", request=request)
        raise JobCancelled("cancelled") from None
    except HandedBack:
        # Nothing is queued if another worker already has the job.
        raise Reject("the job continues here or elsewhere", requeue=True) from None


def register(app: Celery) -> None:
    """Adds the tasks to ``app``."""
    for name in REQUESTS:
        app.task(
            run,
            name=name,
            shared=False,  # with other apps of this process
            bind=True,
            base=RequestTask,
            # A refusal is an answer, not a defect: Celery logs it in one line, without a traceback.
            throws=(LlorchError,),
            # The worker validates the arguments and names the rule they break.
            typing=False,
        )
