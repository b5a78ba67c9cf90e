"""A stock Celery application with a task that does nothing, to compare our queue with."""

from __future__ import annotations

import os

from celery import Celery

NO_OP_TASK = "stock.do_nothing"
REDIS_VARIABLE = "LLORCH_REDIS_URL"


def stock_app(redis_url: str) -> Celery:
    """The app as a user would write it, with Celery's default settings."""
    app = Celery("stock", broker=redis_url, backend=redis_url, set_as_current=False)
    app.task(do_nothing, name=NO_OP_TASK)
    return app


def do_nothing(**_fields: object) -> None:
    """Accept a generation job's arguments and return at once."""


app = stock_app(os.environ.get(REDIS_VARIABLE, "redis://localhost:6379/0"))
