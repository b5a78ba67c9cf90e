"""What FastAPI's own telemetry may record of a request: one span, named after the route."""

from __future__ import annotations

import sys
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_POLLED = ("/health", "/ready", "/metrics")


def _is_polled(scope: Any) -> bool:
    return scope.get("path") in _POLLED


REQUEST_SPANS: Any = {
    "operation_spans": False,
    # They would hold the messages of exceptions, which may quote a text.
    "logs": False,
    "metrics": False,
    "auto_configure": False,
    "exclude": _is_polled,
}
"""FastAPI's ``telemetry`` option. Spans go to the process' tracer provider, if it has one."""


def without_query(app: ASGIApp) -> ASGIApp:
    """Middleware that takes the query, which may be anything, out of the request's span."""

    async def redacted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("query_string"):
            trace = sys.modules["opentelemetry.trace"]
            trace.get_current_span().set_attribute("url.query", "REDACTED")
        await app(scope, receive, send)

    return redacted
