"""prometheus_client's HTTP server, which its clients cannot exhaust."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 16
"""Each holds a thread and a file descriptor, which a worker needs for its jobs."""
IDLE_S: Final = 10.0
"""A connection that sends or takes nothing for this long is closed."""

Answer = tuple[int, bytes, str]
"""Status, body and content type."""
Routes = Mapping[str, Callable[[str | None], Answer]]
"""Path -> what answers the header ``Accept``."""


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
