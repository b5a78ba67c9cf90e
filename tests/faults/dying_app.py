"""The toy worker, which dies when it is about to count the ``DIE_AT_PART``-th part of a chord.

If that is 0, it dies when it is about to send the body.

By then the part's result is stored.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from llorch_worker.broker.celery.backend import ResultBackend
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app

DIE_AT_PART = int(os.environ["DIE_AT_PART"])

_count_part = ResultBackend.on_chord_part_return
_parts = itertools.count(1)


def die_at_part(self: ResultBackend, *args: Any, **options: Any) -> Any:
    if next(_parts) == DIE_AT_PART:
        os.kill(os.getpid(), signal.SIGKILL)
    return _count_part(self, *args, **options)


def die_sending(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ResultBackend.on_chord_part_return = die_at_part
app = build_app(Settings())
# Celery lets no other worker send the body until a few such timeouts have passed.
app.conf.broker_connection_timeout = 0.1
if DIE_AT_PART == 0:
    app.amqp._retry_publish = die_sending
app.engine_class = "tests.toy_engine:ToyEngine"
