"""The whole worker, on a Celery that finds a silent connection stale after 2 s, not 26."""

from __future__ import annotations

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

app = build_app(Settings())
app.engine_class = "tests.toy_engine:ToyEngine"
app.conf.broker_transport_options |= {"health_check_interval": 1}
