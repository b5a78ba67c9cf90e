"""The toy worker, which does not look at its queues just because it has not for some seconds."""

from __future__ import annotations

from llorch_worker.broker import transport
from tests.toy_app import app as app

transport.WAIT_S = 600
