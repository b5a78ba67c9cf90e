"""``celery -A tests.other_app worker``: a stock application on the same Redis, with two tasks."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

URL = os.environ["LLORCH_REDIS_URL"]
app = Celery("other", broker=URL, backend=URL)


@app.task(name="other.text")
def text(results: Any) -> Any:
    """The texts of one generation, or of a chord's parts."""
    return [each["text"] for each in results] if isinstance(results, list) else results["text"]


@app.task(name="other.failed")
def failed(job_id: str, key: str) -> None:
    """An errback. Workers that do not know its signature call it with the job's id."""
    app.backend.client.set(key, job_id)
