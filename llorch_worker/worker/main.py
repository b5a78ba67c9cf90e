"""Runs one worker in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from celery.utils.nodenames import default_nodename, host_format

from llorch_worker.settings import Settings
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.celery.app import build_app


def run_worker(
    settings: Settings,
    *,
    hostname: str | None = None,
    loglevel: str = "INFO",
    on_load_progress: Callable[[int, int], None] | None = None,
    engine_class: str | None = None,
    assignment: Assignment | None = None,
) -> None:
    """Serves ``settings.model`` until SIGTERM or Ctrl-C, then finishes what runs and returns.

    ``hostname`` (``name`` or ``name@host``) must be unique among the workers of one Redis; by
    default it is made of the model's name and the process id. ``on_load_progress`` is called
    with bytes loaded and bytes in all. ``engine_class`` (``module:Class``) names what is loaded in
    the engine's place, where the worker itself is to be measured. ``assignment``: what
    :func:`assign_device` gave, where that was called already. Raises SystemExit with the exit
    code where the worker failed, having logged why.
    """
    app = build_app(settings)
    app.on_load_progress = on_load_progress
    app.assignment = assignment
    if engine_class is not None:
        app.engine_class = engine_class
    worker = app.Worker(
        hostname=host_format(default_nodename(hostname or _unique_name(settings))),
        loglevel=loglevel,
        quiet=True,
        # Gossip is only chatter between workers; Flower lives on events and heartbeats.
        without_gossip=True,
    )
    worker.start()
    if worker.exitcode:
        raise SystemExit(worker.exitcode)


def _unique_name(settings: Settings) -> str:
    return f"{settings.served_name}-{os.getpid()}@"


def worker_hostname(settings: Settings, pid: int, card: str | None = None) -> str:
    """The Celery node name of the worker in process ``pid`` of this machine; one on a card is
    called after it, because it is the only one there."""
    return f"{card or f'{settings.served_name}-{pid}'}@{socket.gethostname()}"
