"""Errors of jobs in OpenAI's shape, with our code, hint and faults beside it."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from llorch_worker.contract import (
    AttemptsExhausted,
    Cancelled,
    DeadlineExceeded,
    Fault,
    FinishReason,
    IdempotencyKeyReused,
    InternalError,
    InvalidRequest,
    JobLost,
    LlorchError,
    ModelChanged,
    ModelLoadFailed,
    ModelNotServed,
    OutOfMemory,
    QueueFull,
    Usage,
)


class ErrorDetail(BaseModel):
    """OpenAI's fields, then ours."""

    message: str
    type: str
    param: str | None = None
    code: str
    llorch_code: str
    retriable: bool = False
    faults: tuple[Fault, ...] = ()


class ErrorBody(BaseModel):
    error: ErrorDetail


class NoWorker(ModelNotServed):
    """The model is known, but no worker serves it now."""


class RedisUnreachable(InternalError):
    """The queue does not answer."""

    code = "REDIS_UNREACHABLE"


class GatewayStopping(InternalError):
    """The gateway stops; another one serves."""

    code = "GATEWAY_STOPPING"
    retriable = True


_STATUS: tuple[tuple[type[LlorchError], int], ...] = (
    (IdempotencyKeyReused, 409),
    (InvalidRequest, 400),
    (NoWorker, 503),
    (ModelNotServed, 404),
    (QueueFull, 429),
    (DeadlineExceeded, 504),
    (Cancelled, 409),
    (OutOfMemory, 503),
    (ModelChanged, 503),
    (ModelLoadFailed, 503),
    (RedisUnreachable, 503),
    (GatewayStopping, 503),
    (AttemptsExhausted, 500),
    (JobLost, 503),
    (InternalError, 500),
)
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    429: "rate_limit_error",
}
_OPENAI_CODES = {"MODEL_NOT_SERVED": "model_not_found", "QUEUE_FULL": "rate_limit_exceeded"}


def status_of(error: LlorchError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def nothing_came(ends: Iterable[tuple[FinishReason, Usage]]) -> DeadlineExceeded | None:
    """The error of jobs that have no token because of their deadline; None if one has any, or has
    ended otherwise."""
    if all(reason == "deadline" and not usage.completion for reason, usage in ends):
        return DeadlineExceeded("the deadline passed before the first token")
    return None


def body_of(error: LlorchError) -> ErrorBody:
    """The answer to a job's error; also what a stream ends with."""
    status = status_of(error)
    document = error.document()
    return ErrorBody(
        error=ErrorDetail(
            message=document.message,
            type=ERROR_TYPES.get(status, "server_error"),
            param=document.faults[0].field if document.faults else None,
            code=_OPENAI_CODES.get(document.code, document.code.lower()),
            llorch_code=document.code,
            retriable=document.retriable,
            faults=document.faults,
        )
    )
