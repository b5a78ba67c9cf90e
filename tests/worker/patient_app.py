"""The toy worker, which does not look at its queues just because it has not for some seconds."""

from __future__ import annotations

from llorch_worker.broker import claim_channel
from tests.toy_app import app as app

claim_channel.WAIT_S = 600
