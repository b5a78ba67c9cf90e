"""A stock Celery application with a task that does nothing: what our queue is compared to."""

from __future__ import annotations

import os

from celery import Celery

NO_OP_TASK = "stock.do_nothing"
REDIS_VARIABLE = "LLORCH_REDIS_URL"


def stock_app(redis_url: str) -> Celery:
    """As a user would write it, with Celery's own settings throughout."""
    app = Celery("stock", broker=redis_url, backend=redis_url, set_as_current=False)
    app.task(do_nothing, name=NO_OP_TASK)
    return app


def do_nothing(**_fields: object) -> None:
    """Take what a generation job takes, and return at once."""


app = stock_app(os.environ.get(REDIS_VARIABLE, "redis://localhost:6379/0"))
