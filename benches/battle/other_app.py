"""``celery -A benches.battle.other_app worker``: a stock application for what follows our jobs."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

NAME = "stock"
QUEUE = "battle"
TASK = "battle.join"
RUNS = "battle:runs"
"""List: the id of each run."""

URL = os.environ.get("LLORCH_REDIS_URL")
app = Celery("other", broker=URL, backend=URL, set_as_current=False)
app.conf.task_default_queue = QUEUE


@app.task(name=TASK, bind=True)  # type: ignore[untyped-decorator]
def join(task: Any, _results: Any) -> None:
    """Notes that it ran."""
    app.backend.client.rpush(RUNS, task.request.id)
