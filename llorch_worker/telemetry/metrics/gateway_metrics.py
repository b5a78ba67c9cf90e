"""The metrics of one gateway: the fleet's, and of its own requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from llorch_worker.telemetry.metrics.buckets import FIRST_TOKEN_S
from llorch_worker.telemetry.metrics.fleet_metrics import FleetCollector

SOCKET: Final = "WEBSOCKET"
"""In place of a method: a message of a WebSocket, or the handshake that was refused."""
_METHODS: Final = {"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", SOCKET}
OTHER: Final = "other"
"""Methods and paths that nobody serves: clients could invent any number of them."""


@dataclass
class Answer:
    """What becomes known of a request while it is served."""

    route: str = OTHER
    """The route's template, such as ``/v1/jobs/{job_id}``; never the URL, which may hold ids."""
    status: int = 499
    """499 if no answer began: the client hung up."""


class GatewayMetrics:
    """The registry that a gateway serves. Thread-safe."""

    def __init__(self, redis_url: str) -> None:
        disable_created_metrics()
        self.registry = registry = CollectorRegistry()
        self._fleet = FleetCollector(redis_url)
        registry.register(self._fleet)
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "llorch_gateway_requests",
            "Requests that were answered; status 499: the client hung up before.",
            ("method", "route", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "llorch_gateway_request_seconds",
            "From a request's arrival to the end of its answer, streams included.",
            ("route",),
            registry=registry,
            buckets=FIRST_TOKEN_S,
        )
        self._open = Gauge(
            "llorch_gateway_open_requests", "Requests without a whole answer.", registry=registry
        )

    @contextmanager
    def request(self, method: str) -> Iterator[Answer]:
        """Counts a request. The caller fills in the answer."""
        answer = Answer()
        began_s = time.monotonic()
        self._open.inc()
        try:
            yield answer
        finally:
            self._open.dec()
            self._seconds.labels(answer.route).observe(time.monotonic() - began_s)
            known = method if method in _METHODS else OTHER
            self._requests.labels(known, answer.route, str(answer.status)).inc()

    def close(self) -> None:
        self._fleet.close()
