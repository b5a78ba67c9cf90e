"""The toy worker, where Celery's bookkeeping for a job waits until the engine has begun it.

It says so in its log; where the engine does not begin, it gives up after ``WAIT_S``.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import signals

from llorch_worker.settings import Settings
from tasks.app import build_app

WAIT_S = 5.0

app = build_app(Settings())
app.engine_class = "tests.toy_engine:ToyEngine"


@signals.task_received.connect
def _wait_for_the_engine(request: Any, **_: Any) -> None:
    residency = app.residency
    assert residency is not None
    before = residency.engine.stats().steps_total
    give_up_s = time.monotonic() + WAIT_S
    while residency.engine.stats().steps_total == before and time.monotonic() < give_up_s:
        time.sleep(0.001)
    computed = residency.engine.stats().steps_total > before
    said = "computed before" if computed else "not computed before"
    logging.getLogger("tests").warning("%s %s", said, request.id)
