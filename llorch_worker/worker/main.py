"""Runs one worker in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from llorch_worker.contract import LlorchError
from llorch_worker.settings import Settings
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.celery.app import build_app


def run_worker(
    settings: Settings,
    *,
    hostname: str | None = None,
    on_load_progress: Callable[[int, int], None] | None = None,
    assignment: Assignment | None = None,
) -> None:
    """Serves ``settings.model`` until SIGTERM or Ctrl-C, then finishes running jobs and returns.

    Args:
        hostname: the worker's node name, unique in its Redis; by default :func:`worker_hostname`.
        on_load_progress: called with the bytes loaded and the bytes in total.
        assignment: the result of :func:`assign_device`, if it was already called.

    Raises:
        LlorchError: the model cannot be loaded.
        SystemExit: the worker failed, and has logged why.
    """
    app = build_app(settings)
    errors: list[LlorchError] = []
    app.on_load_progress, app.on_load_error = on_load_progress, errors.append
    app.assignment = assignment
    worker = app.Worker(
        hostname=hostname or worker_hostname(settings, os.getpid()),
        loglevel="INFO",
        quiet=True,
        # Workers need not know each other; Flower needs events and heartbeats.
        without_gossip=True,
    )
    worker.start()
    if errors:
        raise errors[0]
    if worker.exitcode:
        raise SystemExit(worker.exitcode)


def worker_hostname(settings: Settings, pid: int, card: str | None = None) -> str:
    """The node name of the worker in process ``pid`` of this machine. A worker on a card is named
    after it, because it is the only one there."""
    return f"{card or f'{settings.served_names[0]}-{pid}'}@{socket.gethostname()}"
