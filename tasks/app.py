"""The Celery app, built from Settings."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from typing import Any

from celery import signals
from pydantic import ValidationError

from llorch_worker.broker import transport
from llorch_worker.broker.celery_app import LlorchApp, task_queues, worker_config
from llorch_worker.broker.claims import ClaimTerms
from llorch_worker.broker.connection import BrokerRefused
from llorch_worker.settings import Settings
from tasks.generate import register

_CELERY_COMMAND = "celery.bin.celery"
"""The module that is loaded where a ``celery`` command runs."""
_APP_OPTIONS = ("-A", "--app")


def build_app(settings: Settings) -> LlorchApp:
    """An app that can serve ``settings.model`` and send jobs to whoever serves it."""
    app = LlorchApp("llorch")
    app.settings = settings
    app.conf.update(worker_config(settings))
    # By name, so that only a worker imports the engine.
    app.steps["worker"].add("llorch_worker.worker.step:ResidencyStep")
    register(app)
    return app


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
def _prepare_worker(sender: str, instance: Any, **_: Any) -> None:
    # Before the worker's first connection.
    settings: Settings = instance.app.settings
    terms = ClaimTerms(
        lease_ms=round(settings.lease_s * 1e3),
        max_attempts=settings.max_attempts,
        result_ttl_s=settings.result_ttl_s,
        stream_ttl_s=settings.stream_ttl_s,
    )
    transport.install(terms, worker=sender)
    # Only now is the worker's name known, and with it the queue of its own.
    instance.app.conf.task_queues = task_queues(settings.served_name, sender)


def _build_from_environment() -> LlorchApp:
    """Raises SystemExit, with one sentence, in ``celery -A tasks``, which would print the whole
    traceback of this import. A producer, or its own ``celery`` command, gets the error itself.
    """
    try:
        return build_app(Settings())
    except (ValidationError, BrokerRefused) as error:
        if not _is_the_commands_app(sys.argv[1:]):
            raise
        from llorch_worker.cli.errors import explain

        explained = explain(error)
        assert explained is not None
        document, exit_code = explained
        sys.stderr.write(f"error: {document.message}\n")
        raise SystemExit(exit_code) from None


def _is_the_commands_app(arguments: list[str]) -> bool:
    """Whether this process is a ``celery`` command whose ``arguments`` name this package."""
    if _CELERY_COMMAND not in sys.modules:
        return False
    words = " ".join(arguments).replace("=", " ").split()
    named = [app for option, app in pairwise(words) if option in _APP_OPTIONS]
    return any(re.split(r"[.:]", app)[0] == __package__ for app in named)


app = _build_from_environment()
