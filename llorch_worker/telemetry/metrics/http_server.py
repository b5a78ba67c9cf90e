"""Serves metrics by prometheus_client's HTTP server, which its clients cannot exhaust."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import (
    CONTENT_TYPE_PLAIN_0_0_4,
    ThreadingWSGIServer,
    choose_encoder,
    generate_latest,
)

from llorch_worker.broker.connections.url import in_brackets

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 16
"""Each holds a thread and a file descriptor, which a worker needs for its jobs."""
IDLE_S: Final = 10.0
"""A connection that sends or takes nothing for this long is closed."""

Answer = tuple[int, bytes, str]
"""Status, body and content type."""
Routes = Mapping[str, Callable[[str | None], Answer]]
"""Path -> what answers the header ``Accept``."""
PORTS = 20
"""Workers of one host share this many ports, each the first free one."""
_ANY = ("", "0.0.0.0", "::")


class Server(ThreadingWSGIServer):
    """More than :data:`MOST_CONNECTIONS` at once are closed without an answer."""

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        """Raises ``OSError`` if it cannot listen there."""
        self._open: set[Any] = set()
        self._routes = routes
        self.address_family, _, _, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        super().__init__((str(place[0]), port), _Handler)
        self.set_app(self._answer)

    def verify_request(self, request: Any, _address: Any) -> bool:
        self._open.add(request)
        return len(self._open) <= MOST_CONNECTIONS

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        # The client is gone, or slow.
        logger.debug("a reader of metrics left: %r", sys.exception())

    def _answer(self, environ: Mapping[str, Any], start: Callable[..., Any]) -> list[bytes]:
        answer = self._routes.get(environ["PATH_INFO"])
        if answer is None:
            status, body, kind = (
                404,
                f"here are: {', '.join(self._routes)}\n".encode(),
                "text/plain",
            )
        else:
            try:
                status, body, kind = answer(environ.get("HTTP_ACCEPT"))
            except Exception as error:  # noqa: BLE001 - wsgiref would write a traceback to stderr
                logger.error("a request for metrics failed: %r", error)
                status, body, kind = 500, b"", "text/plain"
        headers = [("Content-Type", kind), ("Content-Length", str(len(body)))]
        start(f"{status} {HTTPStatus(status).phrase}", headers)
        return [body]


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def exposition(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """The text, and its content type. ``accept`` is the header; the plain format answers one that
    cannot be understood."""
    try:
        encode, content_type = choose_encoder(accept or "")
    except (TypeError, ValueError):
        # A version that is no number.
        encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
    return encode(registry), content_type


class MetricsServer:
    """Serves a registry to Prometheus, from a thread, until :meth:`close`."""

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
            logger.info("metrics at http://%s:%d/metrics", in_brackets(server.host), port)
            return server
    logger.warning(
        "no metrics: cannot listen at a port from %d to %d of %s: %s",
        first_port,
        last_port,
        host,
        reason,
    )
    return None
