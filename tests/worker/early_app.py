"""The toy worker, where Celery's bookkeeping for the first job waits until the engine has begun it.

It says so in its log; where the engine does not begin, it gives up after ``WAIT_S``.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import signals

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

WAIT_S = 5.0

app = build_app(Settings())
app.engine_class = "tests.toy_engine:ToyEngine"


_warm_up_steps = 0


def _steps() -> int:
    assert app.residency is not None
    steps: int = app.residency.engine.stats().steps_total
    return steps


@signals.worker_ready.connect
def _note_the_warm_up(**_: Any) -> None:
    global _warm_up_steps
    _warm_up_steps = _steps()


@signals.task_received.connect
def _wait_for_the_engine(request: Any, **_: Any) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while _steps() == _warm_up_steps and time.monotonic() < give_up_s:
        time.sleep(0.001)
    first = "the engine" if _steps() > _warm_up_steps else "Celery"
    logging.getLogger("tests").warning("%s was first at %s", first, request.id)
