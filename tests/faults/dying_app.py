"""The toy worker, which dies when it is about to count the ``DIE_AT_PART``-th part of a chord.

By then the part's result is stored.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from llorch_worker.broker.backend import ResultBackend
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

DIE_AT_PART = int(os.environ["DIE_AT_PART"])

_count_part = ResultBackend.on_chord_part_return
_parts = itertools.count(1)


def die_at_part(self: ResultBackend, *args: Any, **options: Any) -> Any:
    if next(_parts) == DIE_AT_PART:
        os.kill(os.getpid(), signal.SIGKILL)
    return _count_part(self, *args, **options)


ResultBackend.on_chord_part_return = die_at_part
app = build_app(Settings())
app.engine_class = "tests.toy_engine:ToyEngine"
