"""The toy worker, which says at its start how many objects its garbage collector leaves out."""

from __future__ import annotations

import gc
import logging
from typing import Any

from celery import signals

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

app = build_app(Settings())
app.engine_class = "tests.toy_engine:ToyEngine"


@signals.worker_ready.connect(weak=False)
def count(**_: Any) -> None:
    logging.getLogger(__name__).warning("frozen in the keeper: %d", gc.get_freeze_count())
