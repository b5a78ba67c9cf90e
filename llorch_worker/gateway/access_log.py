"""A line of the log for each request, at the end of its answer."""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_worker.contract import printable

logger = logging.getLogger(__name__)

CONSOLE = "/console/"
"""The page reads a dozen files there when it opens, and then documents every two seconds."""


@dataclass
class _Access:
    status: int | None = None
    jobs: list[str] = field(default_factory=list)


_ACCESS: ContextVar[_Access | None] = ContextVar("llorch_access", default=None)


def note_job(job_id: str) -> None:
    """The request that is being answered is about this job."""
    access = _ACCESS.get()
    if access is not None and job_id not in access.jobs:
        access.jobs.append(job_id)


def logging_access(app: ASGIApp) -> ASGIApp:
    """``app``, whose log has the key's name, the duration and the job of each request as fields.

    The query, which may be anything, is left out. What a console reads has no line unless it fails.
    """

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        access, began_s = _Access(), time.perf_counter()
        state = scope.setdefault("state", {})
        token = _ACCESS.set(access)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                access.status = message["status"]
            await send(message)

        try:
            return await app(scope, receive, noting)
        finally:
            _ACCESS.reset(token)
            _log(scope, state, access, time.perf_counter() - began_s)

    return logged


def _log(scope: Scope, state: Any, access: _Access, took_s: float) -> None:
    read = scope["method"] == "GET" and access.status in (200, 304)
    if read and scope["path"].startswith(CONSOLE):
        return
    method, path = printable(scope["method"]), printable(scope["path"])
    host, port = scope.get("client") or ("", 0)
    jobs = access.jobs or [each for each in [scope.get("path_params", {}).get("job_id")] if each]
    caller = state.get("caller")
    fields = {
        "method": method,
        "path": path,
        "status": access.status,
        "duration_ms": round(took_s * 1e3, 1),
        "key": getattr(caller, "name", "") or None,
        "job_id": jobs[0] if len(jobs) == 1 else jobs or None,
    }
    logger.info(
        '%s:%d - "%s %s HTTP/%s" %s',
        *(host, port, method, path, scope["http_version"], access.status or "no answer"),
        extra={"fields": fields},
    )
