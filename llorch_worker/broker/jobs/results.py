"""A job's stored state, in the format of Celery's own Redis backend."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from celery.exceptions import TaskRevokedError
from celery.states import READY_STATES
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from llorch_worker.contract import (
    ERROR_CLASSES,
    Cancelled,
    CancelledEvent,
    Event,
    Failed,
    Finished,
    InternalError,
    JobResult,
    LlorchError,
)
from llorch_worker.contract.kinds import AnyResult
from llorch_worker.contract.plain_objects import unmark_plain

SUCCESS, FAILURE, REVOKED, STARTED = "SUCCESS", "FAILURE", "REVOKED", "STARTED"


@dataclass(frozen=True)
class StoredState:
    """A job's state in the result backend; ``end`` is set once the job has ended."""

    status: str
    end: JobResult | LlorchError | None = None
    worker: str | None = None


_RESULT: TypeAdapter[AnyResult] = TypeAdapter(AnyResult)


class _Succeeded(BaseModel):
    status: Literal["SUCCESS"]
    result: AnyResult


class _Stored(BaseModel):
    status: str
    result: Any = None


_STORED: TypeAdapter[_Succeeded | _Stored] = TypeAdapter(
    Annotated[_Succeeded | _Stored, Field(union_mode="left_to_right")]
)


def decode_state(document: str | bytes | None) -> StoredState:
    """The state in a ``celery-task-meta-<id>`` value; ``None`` (no such key) is PENDING."""
    if document is None:
        return StoredState("PENDING")
    try:
        stored = _STORED.validate_json(document)
    except ValidationError:
        # JSON can escape half a surrogate pair, which pydantic refuses.
        stored = _Stored.model_validate(json.loads(document))
    if isinstance(stored, _Succeeded):
        return _succeeded(stored.result)
    status, result = stored.status, stored.result
    match status:
        case "SUCCESS":
            # Raises, and names the invalid field.
            return _succeeded(_RESULT.validate_python(result))
        case "FAILURE":
            return StoredState(status, end=_error(result))
        case "REVOKED":
            return StoredState(status, end=Cancelled("the job was cancelled"))
    hostname = result.get("hostname") if isinstance(result, dict) else None
    return StoredState(status, worker=hostname)


def _succeeded(result: JobResult) -> StoredState:
    if result.metadata is not None:
        result = result.model_copy(update={"metadata": unmark_plain(result.metadata)})
    return StoredState(SUCCESS, end=result, worker=result.worker)


def terminal_event(end: JobResult | LlorchError) -> Event:
    """The event that closes the stream of a job with this end."""
    match end:
        case JobResult():
            return Finished(finish_reason=end.ended, usage=end.usage, timings=end.timings)
        case Cancelled():
            return CancelledEvent()
        case _:
            return Failed(error=end.document())


def _error(stored: Any) -> LlorchError:
    # ``exc_message`` is the exception's ``args``.
    name, arguments = stored.get("exc_type", "an error"), stored.get("exc_message")
    if isinstance(arguments, list) and len(arguments) == 4 and arguments[1] in ERROR_CLASSES:
        message, code, retriable, faults = arguments
        return ERROR_CLASSES[code](message, code, retriable, faults)
    return InternalError(f"the worker could not run the job: {name}")


def failure_document(job_id: str, error: Exception) -> str:
    """The document that Celery's Redis backend stores for a task that raised ``error``."""
    return _error_document(job_id, FAILURE, error)


def revoked_document(job_id: str) -> str:
    """The document that Celery's Redis backend stores for a revoked task."""
    return _error_document(job_id, REVOKED, TaskRevokedError("cancelled"))


def started_document(job_id: str, worker: str, pid: int) -> str:
    """The document that Celery's Redis backend stores for a task that begins in process ``pid``."""
    return json.dumps(result_meta(job_id, STARTED, {"pid": pid, "hostname": worker}))


def result_meta(
    job_id: str, status: str, result: Any, *, traceback: str | None = None, children: Any = ()
) -> dict[str, Any]:
    """The fields that Celery stores for every task."""
    return {
        "status": status,
        "result": result,
        "traceback": traceback,
        "children": children,
        "date_done": datetime.now(UTC).isoformat() if status in READY_STATES else None,
        "task_id": job_id,
    }


def _error_document(job_id: str, status: str, error: Exception) -> str:
    result = {
        "exc_type": type(error).__name__,
        "exc_message": error.args,
        "exc_module": type(error).__module__,
    }
    return json.dumps(result_meta(job_id, status, result))
