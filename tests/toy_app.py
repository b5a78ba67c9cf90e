"""``celery -A tests.toy_app worker``: the whole worker with the toy engine."""

from __future__ import annotations

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

app = build_app(Settings())
app.engine_class = "tests.toy_engine:ToyEngine"
