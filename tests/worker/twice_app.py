"""The toy worker, which gets a second SIGTERM while Celery handles the first."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from celery import signals

from tests.toy_app import app as app

_shutting_down: Any = signals.worker_shutting_down
_clear = _shutting_down._clear_dead_receivers
_sent = False


def _interrupted() -> None:
    """It holds the lock of Celery's signal."""
    global _sent
    if not _sent and sys._getframe(1).f_code.co_name == "_live_receivers":
        _sent = True
        os.kill(os.getpid(), signal.SIGTERM)
    _clear()


_shutting_down._clear_dead_receivers = _interrupted
