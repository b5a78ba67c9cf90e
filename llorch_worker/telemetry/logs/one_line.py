"""Keeps a message of the log on its line."""

from __future__ import annotations

import logging

from llorch_worker.contract import printable


class OneLine(logging.Filter):
    """Escapes what a name or an id could forge lines or control a terminal with."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (LookupError, TypeError, ValueError):
            return True  # the handler reports it
        if not message.isprintable():
            # Some of Celery's own messages have several lines.
            record.msg, record.args = printable(" ".join(message.splitlines())), ()
        return True
