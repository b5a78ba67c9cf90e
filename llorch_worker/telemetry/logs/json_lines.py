"""Log lines as JSON documents, one a line."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import Any

from celery import current_task


class JsonFormatter(logging.Formatter):
    """``extra={"fields": {...}}`` of a logging call adds fields to the document."""

    def format(self, record: logging.LogRecord) -> str:
        document = _document(record.created, record.levelname, record.name, record.getMessage())
        fields = getattr(record, "fields", {})
        # To ask Celery for the current task costs as much as the rest of the line.
        if "job_id" not in fields and current_task and current_task.request.id:
            document["job_id"] = current_task.request.id
        if "trace_id" not in fields and (trace_id := _current_trace_id()) is not None:
            document["trace_id"] = trace_id
        document |= fields
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            # Of a line that another process logged.
            document["exception"] = record.exc_text
        # Only ASCII: no character of a name can control a terminal.
        return json.dumps(document, default=str)


def document_line(level: str, logger: str, message: str) -> str:
    """The line of what was printed and not logged."""
    return json.dumps(_document(time.time(), level, logger, message)) + "\n"


def _document(at_s: float, level: str, logger: str, message: str) -> dict[str, Any]:
    at = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return {
        "time": at.replace("+00:00", "Z"),
        "level": level,
        "logger": logger,
        "message": message,
        "process": os.getpid(),
    }


def _current_trace_id() -> str | None:
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}" if span.is_valid else None
