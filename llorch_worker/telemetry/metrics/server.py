"""Serves a registry to Prometheus, from a thread."""

from __future__ import annotations

import logging
import socket
import threading

from prometheus_client import CollectorRegistry

from llorch_worker.telemetry.metrics.exposition import exposition
from llorch_worker.telemetry.metrics.http_server import Answer, Server

logger = logging.getLogger(__name__)

PORTS = 20
"""Workers of one host share this many ports, each the first free one."""
_ANY = ("", "0.0.0.0", "::")


class MetricsServer:
    """Listens until :meth:`close`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises ``OSError`` if the port is taken."""
        self.port = port
        self.host = socket.gethostname() if host in _ANY else host
        """Where others may reach it."""

        def metrics(accept: str | None) -> Answer:
            return 200, *exposition(registry, accept)

        self._server = Server(host, port, {"/metrics": metrics})
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(registry: CollectorRegistry, host: str, first_port: int) -> MetricsServer | None:
    """Takes the first free of :data:`PORTS` ports. None, after a warning, if there is none."""
    last_port = min(first_port + PORTS, 2**16) - 1
    reason: OSError | None = None
    for port in range(first_port, last_port + 1):
        try:
            server = MetricsServer(registry, host, port)
        except OSError as error:
            reason = error
        else:
            name = f"[{server.host}]" if ":" in server.host else server.host
            logger.info("metrics at http://%s:%d/metrics", name, port)
            return server
    logger.warning(
        "no metrics: cannot listen at a port from %d to %d of %s: %s",
        first_port,
        last_port,
        host,
        reason,
    )
    return None
