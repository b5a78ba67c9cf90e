"""The toy worker, which does not look at its queues just because it has not for some seconds."""

from __future__ import annotations

from llorch_worker.worker import claimer
from tests.toy_app import app as app

claimer.WAIT_S = 600
