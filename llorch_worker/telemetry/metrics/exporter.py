"""A small HTTP server with the fleet's metrics, and with the workers that Prometheus may scrape."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from redis.exceptions import RedisError

from llorch_worker.broker import registry
from llorch_worker.broker.connection import connect
from llorch_worker.telemetry.metrics.fleet_metrics import REPLY_TIMEOUT_S, FleetCollector

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""A connection that asks nothing for this long is closed."""


class Exporter(ThreadingHTTPServer):
    """``/metrics``, ``/targets`` (Prometheus' HTTP service discovery) and ``/health``.

    It keeps nothing, so any number may run. It asks for no keys and tells the names of models and
    workers.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, redis_url: str, host: str, port: int) -> None:
        """Raises ``OSError`` if it cannot listen there."""
        # First, because a server that cannot listen closes itself.
        self._redis = connect(redis_url, reply_timeout_s=REPLY_TIMEOUT_S)
        self._fleet = FleetCollector(redis_url)
        self.registry = CollectorRegistry()
        self.registry.register(self._fleet)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def targets(self) -> list[dict[str, Any]]:
        """One group for each worker that serves metrics. Raises ``RedisError``."""
        return [
            {
                "targets": [card.metrics_address],
                "labels": {
                    "worker": card.hostname,
                    "device": card.device,
                    "__meta_llorch_model": card.model,
                },
            }
            for card in registry.workers(self._redis)
            if card.metrics_address is not None
        ]

    def server_close(self) -> None:
        super().server_close()
        self._fleet.close()
        self._redis.close()


class _Handler(BaseHTTPRequestHandler):
    server: Exporter
    timeout = IDLE_S
    protocol_version = "HTTP/1.1"
    server_version = "llorch-exporter"
    sys_version = ""

    def do_GET(self) -> None:
        answers: dict[str, Callable[[], None]] = {
            "/metrics": self._metrics,
            "/targets": self._targets,
            "/health": lambda: self._answer(200, b'{"status":"ok"}'),
        }
        known = answers.get(self.path.partition("?")[0])
        if known is None:
            self._answer(404, b'{"error":"/metrics, /targets and /health are here"}')
        else:
            known()

    def _metrics(self) -> None:
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer(200, encode(self.server.registry), content_type)

    def _targets(self) -> None:
        try:
            targets = self.server.targets()
        except RedisError as error:
            # Prometheus then keeps the targets that it knows.
            logger.warning("no targets: %s", error)
            self._answer(503, b'{"error":"Redis does not answer"}')
            return
        self._answer(200, json.dumps(targets).encode())

    def _answer(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
