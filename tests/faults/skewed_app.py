"""The whole worker on a machine whose clock is wrong by ``CLOCK_OFFSET_S`` seconds."""

from __future__ import annotations

import tests.faults.skewed_clock  # noqa: F401 - before anybody reads the clock
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

app = build_app(Settings())
kind = "ToyEngine" if app.settings.served_name == "toy" else "Engine"
app.engine_class = f"tests.faults.skewed_engine:{kind}"
