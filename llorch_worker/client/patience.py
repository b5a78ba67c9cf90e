"""Waiting for a Redis that does not answer."""

from __future__ import annotations

import asyncio
import time

from llorch_worker.contract.errors import BrokerUnavailable

RETRY_S = 0.25


class Patience:
    """How long a reader bears an outage of Redis, from its first failed command on."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: float | None = None

    async def bear(self, error: BrokerUnavailable) -> None:
        """Waits before the next attempt; raises ``error`` if the outage is too long."""
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= self._patience_s:
            raise error
        await asyncio.sleep(RETRY_S)

    def relax(self) -> None:
        """Redis has answered."""
        self._since_s = None
