"""Ends a worker that was asked to leave while Redis accepts connections and answers nothing."""

from __future__ import annotations

import os
import time

from celery.platforms import EX_OK
from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker.connection import connect_impatient
from llorch_worker.broker.repeater import Repeater

logger = get_logger(__name__)

GRACE_S = 5.0
"""How long after its time to drain a worker may take to leave by itself."""


def leave_in_time(redis_url: str, drain_s: float) -> None:
    """Ends the process soon after ``drain_s``, unless Redis answers.

    Each part that says goodbye to Redis would wait for its reply, one after the other. What they
    would say, Redis finds by itself: leases lapse, and others take the jobs over.
    """
    leave_at_s = time.monotonic() + drain_s + GRACE_S

    def leave() -> None:
        if time.monotonic() < leave_at_s:
            return
        try:
            with connect_impatient(redis_url) as client:
                client.ping()
        except RedisError as error:
            logger.warning("Redis is away, and the worker leaves without it: %s", error)
            os._exit(EX_OK)

    Repeater("last-exit", "leave in time", leave, 1.0).start()
