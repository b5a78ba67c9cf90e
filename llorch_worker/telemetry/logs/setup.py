"""Puts the formats and filters of ``LLORCH_LOG_FORMAT`` onto handlers."""

from __future__ import annotations

import logging
from typing import Any

from celery import signals

from llorch_worker.broker.jobs.ended_jobs import ENDED_JOBS
from llorch_worker.contract import printable
from llorch_worker.settings import LogFormat
from llorch_worker.telemetry.logs.job_line import is_of_celery, log_job
from llorch_worker.telemetry.logs.json_lines import JsonFormatter
from llorch_worker.telemetry.logs.repeats import Repeats
from llorch_worker.telemetry.logs.streams import print_documents, say

TEXT = "[%(asctime)s: %(levelname)s] %(message)s"
_LOGGERS_OF_TASKS = ("celery.app.trace", "celery.worker.strategy")


def configure(log_format: LogFormat) -> None:
    """Logs to stderr from level INFO on, in a process without Celery's logging."""
    if log_format == "json":
        print_documents()
    logging.basicConfig(level=logging.INFO, format=TEXT)
    _dress(logging.getLogger(), log_format)


class CeleryLogs:
    """Lets Celery set up its logging, and dresses its handlers.

    A JSON log has one line a job, of our own: Celery's lines about jobs are left out.
    """

    def __init__(self, log_format: LogFormat) -> None:
        self._format = log_format

    def install(self) -> None:
        """Before Celery sets up its logging."""
        signals.after_setup_logger.connect(self._on_set_up, weak=False)
        signals.after_setup_task_logger.connect(self._on_set_up, weak=False)
        if self._format == "json":
            print_documents()
            from celery.apps import worker

            # Celery says in its signal handlers that it shuts down.
            worker.safe_say = say
            ENDED_JOBS.observe(log_job)
            for name in _LOGGERS_OF_TASKS:
                logging.getLogger(name).addFilter(lambda record: not is_of_celery(record))

    def _on_set_up(self, logger: logging.Logger, **_: Any) -> None:
        _dress(logger, self._format)


def _dress(logger: logging.Logger, log_format: LogFormat) -> None:
    for handler in logger.handlers:
        handler.addFilter(Repeats())
        handler.addFilter(OneLine())
        if log_format == "json":
            handler.setFormatter(JsonFormatter())


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
