"""Errors as HTTP answers in OpenAI's shape, with our code, hint and faults beside it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from llorch_worker.anthropic_api.errors import error_document
from llorch_worker.contract import InvalidRequest, LlorchError, QueueFull
from llorch_worker.contract.errors import BrokerUnavailable, as_told
from llorch_worker.gateway.bodies import BodyRefused
from llorch_worker.openai_api.errors import (
    ERROR_TYPES,
    ErrorBody,
    ErrorDetail,
    RedisUnreachable,
    body_of,
    status_of,
)
from llorch_worker.openai_api.shape import faults_of

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5


class HttpError(Exception):
    """An answer other than 2xx that no job caused."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retriable: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retriable = retriable


class TooManyJobs(QueueFull):
    """The caller's key has as many jobs in flight as it may."""


class RateLimited(QueueFull):
    """The caller's key has sent as many requests, or used as many tokens, as it may for now."""

    code = "RATE_LIMIT_EXCEEDED"
    retry_after_s = RETRY_AFTER_S


_CODES = {
    400: "INVALID_REQUEST",
    401: "INVALID_API_KEY",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    408: "REQUEST_TIMEOUT",
    413: "TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
}

_UNROUTED = {
    404: "no such endpoint with this method; /openapi.json lists all, and OpenAI's begin with /v1",
    405: "this endpoint takes another method; /openapi.json lists all",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request breaks a rule; all of them are named.",
        401: "No key, or an unknown one.",
        404: "No such model, job or document.",
        405: "No such method.",
        408: "The body did not arrive in time.",
        409: "The job or document is not in a state for this.",
        413: "The body is too large.",
        415: "The body is compressed.",
        429: "The queue, or this key's share of it, is full.",
        500: "The job failed, or a defect.",
        503: "No worker serves the model, or Redis does not answer.",
        504: "The deadline passed before the first token.",
        507: "The gateway's disk is full.",
    }.items()
}
"""Documents every answer of an endpoint but its own."""


def no_space(error: BaseException | None) -> HttpError | None:
    """The answer to an error of writing a file, if its disk is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return HttpError(507, "NO_SPACE", "the gateway has no space left for this file")
    return None


def as_shown(error: Exception) -> LlorchError:
    """What a client hears of ``error``, which may name our Redis or quote a prompt."""
    match error:
        case BrokerUnavailable() | RedisError():
            return RedisUnreachable("the queue does not answer; try again later")
        case _:
            return as_told(error, "gateway")


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """What a client hears of ``error``, and its HTTP status."""
    if not isinstance(error, HttpError):
        shown = as_shown(error)
        return status_of(shown), body_of(shown)
    status = error.status
    detail = ErrorDetail(
        message=error.message,
        type=ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        param=error.param,
        code=error.code.lower(),
        llorch_code=error.code,
        retriable=error.retriable,
    )
    return status, ErrorBody(error=detail)


def install(app: FastAPI) -> None:
    """Makes every error of ``app`` answer in this shape."""

    @app.exception_handler(LlorchError)
    @app.exception_handler(HttpError)
    @app.exception_handler(Exception)
    def told(_: Request, error: Exception) -> JSONResponse:
        return error_answer(error)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI puts where a value stands ("body", "query", ...) before its path.
        errors = [{**each, "loc": each["loc"][1:]} for each in error.errors()]
        for each in errors:
            if isinstance(each["input"], bytes):
                # FastAPI leaves a body alone that another type announces, as curl's -d does.
                rule = "must be JSON, sent with Content-Type: application/json"
                each.update(type="json", msg=rule, input=None)
        return error_answer(InvalidRequest.from_faults(faults_of(errors)))

    @app.exception_handler(BodyRefused)
    def refused(_: Request, error: BodyRefused) -> JSONResponse:
        return error_answer(error.reason)

    @app.exception_handler(HTTPException)
    def framework_error(request: Request, error: HTTPException) -> JSONResponse:
        # FastAPI keeps a large body in a temporary file.
        if (full := no_space(error.__cause__)) is not None:
            return error_answer(full)
        # OpenAI has no other method of ours there, and its clients take a 405 for a wrong URL.
        unrouted = error.status_code == 405 and request.url.path.startswith("/v1/")
        status = 404 if unrouted else error.status_code
        code = _CODES.get(status, "HTTP_ERROR")
        message = _UNROUTED.get(status, str(error.detail))
        return error_answer(HttpError(status, code, message), error.headers)

    @app.exception_handler(RedisError)
    @app.exception_handler(BrokerUnavailable)
    def no_redis(_: Request, error: BrokerUnavailable | RedisError) -> JSONResponse:
        logger.warning("503: %s", error)
        return error_answer(error)


def error_answer(error: Exception, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """What a client hears of ``error``."""
    status, body = error_body(error)
    headers = dict(headers or {})
    if status in (429, 503):
        after_s = error.retry_after_s if isinstance(error, RateLimited) else RETRY_AFTER_S
        headers["Retry-After"] = str(after_s)
    if status == 409 and not body.error.retriable:
        # OpenAI's and Anthropic's clients send again what a 409 answers.
        headers["x-should-retry"] = "false"
    return _ErrorAnswer(body, status, headers)


class _ErrorAnswer(JSONResponse):
    """In Anthropic's shape for its clients."""

    def __init__(self, body: ErrorBody, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(body.model_dump(mode="json"), status, headers)
        self._for_anthropic = JSONResponse(error_document(status, body.error), status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if speaks_anthropic(scope):
            return await self._for_anthropic(scope, receive, send)
        return await super().__call__(scope, receive, send)


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a client of Anthropic's API sent the request."""
    path: str = scope["path"]
    return path.startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)
