"""The whole worker with the toy engine; the prompt ``escape`` raises past Celery's tracer."""

from __future__ import annotations

from llorch_worker.contract import GenerationResult
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app
from llorch_worker.worker.delivery import Delivery
from llorch_worker.worker.job_runner import JobRunner

_run = JobRunner.run


def escaping_run(self: JobRunner, delivery: Delivery) -> GenerationResult:
    if delivery.fields.get("prompt") == "escape":
        raise SystemExit
    return _run(self, delivery)


JobRunner.run = escaping_run  # type: ignore[method-assign]
app = build_app(Settings())
app.engine_class = "tests.toy_engine:ToyEngine"
