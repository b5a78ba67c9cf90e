"""The Celery app, built from Settings."""

from __future__ import annotations

from typing import Any

from celery import signals

from llorch_worker.broker import transport
from llorch_worker.broker.celery_app import LlorchApp, worker_config
from llorch_worker.settings import Settings
from tasks.generate import register


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
def _prepare_worker(**_: Any) -> None:
    # Before the worker's first connection.
    transport.install()


app = build_app(Settings())
