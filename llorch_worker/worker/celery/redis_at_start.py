"""Whether every connection works that a worker will need, before it takes its first job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state

from llorch_worker.broker.connection import broker_errors, connect
from llorch_worker.contract.errors import BrokerUnavailable

logger = get_logger(__name__)

PAUSE_S = 1.0


class RedisAtStart:
    """A worker that could claim jobs, but not store their results, would fail each of them."""

    def __init__(self, app: Any, report: Callable[[str], None]) -> None:
        """``report`` gets a sign of life while the worker waits."""
        self._app = app
        self._report = report
        self._logged = ""

    def works(self) -> bool:
        """Whether all connections work now; if not, logs why, once for each reason."""
        url = self._app.settings.redis_url
        try:
            with broker_errors(url):
                with connect(url, retries=0) as client:
                    client.ping()
                self._app.backend.client.ping()
                with self._app.connection_for_read() as connection:
                    connection.default_channel.client.ping()
        except BrokerUnavailable as error:
            if str(error) != self._logged:
                logger.error("takes no jobs yet, will retry: %s", error)
            self._logged = str(error)
            return False
        if self._logged:
            logger.info("every connection to Redis works now")
        return True

    def wait(self) -> None:
        """Returns when all connections work; ends with the worker."""
        while not self.works():
            self._report("waiting for Redis")
            state.maybe_shutdown()
            time.sleep(PAUSE_S)
            state.maybe_shutdown()
