"""A small HTTP server with the fleet's metrics, and with the workers that Prometheus may scrape."""

from __future__ import annotations

import json
import logging
from typing import Any

from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import connect_impatient
from llorch_worker.broker.fleet import registry
from llorch_worker.telemetry.metrics.fleet_metrics import FleetCollector
from llorch_worker.telemetry.metrics.http_server import Answer, Server, exposition

logger = logging.getLogger(__name__)

_JSON = "application/json"


class Exporter(Server):
    """``/metrics``, ``/targets`` (Prometheus' HTTP service discovery) and ``/health``.

    It keeps nothing, so any number may run. It asks for no keys and exposes the names of models and
    workers.
    """

    def __init__(self, redis_url: str, host: str, port: int) -> None:
        """Raises ``OSError`` if it cannot listen there."""
        # First, because a server that cannot listen closes itself.
        self._redis = connect_impatient(redis_url)
        self._fleet = FleetCollector(redis_url)
        self.registry = CollectorRegistry()
        self.registry.register(self._fleet)
        routes = {
            "/metrics": lambda accept: (200, *exposition(self.registry, accept)),
            "/targets": lambda _: self._targets(),
            "/health": lambda _: (200, b'{"status":"ok"}', _JSON),
        }
        super().__init__(host, port, routes)

    def targets(self) -> list[dict[str, Any]]:
        """One group for each worker that serves metrics. Raises ``RedisError``."""
        of_each = {card.hostname: card for card in registry.workers(self._redis)}
        return [
            {
                "targets": [card.metrics_address],
                "labels": {
                    "worker": card.hostname,
                    "device": card.device,
                    "__meta_llorch_model": card.model,
                },
            }
            for card in of_each.values()
            if card.metrics_address is not None
        ]

    def _targets(self) -> Answer:
        try:
            return 200, json.dumps(self.targets()).encode(), _JSON
        except RedisError as error:
            # Prometheus then keeps the targets that it knows.
            logger.warning("no targets: %s", error)
            return 503, b'{"error":"Redis does not answer"}', _JSON

    def server_close(self) -> None:
        super().server_close()
        self._fleet.close()
        self._redis.close()
