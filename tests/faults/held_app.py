"""The whole worker with the engine of :mod:`tests.faults.held_engine`."""

from __future__ import annotations

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

app = build_app(Settings())
app.engine_class = "tests.faults.held_engine:Engine"
