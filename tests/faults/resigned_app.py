"""The toy worker, which tries only once to send what follows a job."""

from __future__ import annotations

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

app = build_app(Settings())
app.conf.task_publish_retry_policy = {"max_retries": 0}
app.engine_class = "tests.toy_engine:ToyEngine"
