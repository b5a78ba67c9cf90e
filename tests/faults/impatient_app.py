"""The whole worker, with a Celery that closes a silent connection after 2 s instead of 26."""

from __future__ import annotations

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

app = build_app(Settings())
app.engine_class = "tests.toy_engine:ToyEngine"
app.conf.broker_transport_options |= {"health_check_interval": 1}
