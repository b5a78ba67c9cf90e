"""The whole worker on a machine whose clock is wrong by ``CLOCK_OFFSET_S`` seconds.

Only ``time.time`` in this process is wrong.
"""

from __future__ import annotations

import os
import time

_right = time.time
_offset_s = float(os.environ["CLOCK_OFFSET_S"])
time.time = lambda: _right() + _offset_s

from llorch_worker.settings import Settings  # noqa: E402 - after the clock is set
from llorch_worker.worker.celery.app import build_app  # noqa: E402

app = build_app(Settings())
if app.settings.served_name == "toy":
    app.engine_class = "tests.toy_engine:ToyEngine"
