"""A small HTTP server that its clients cannot exhaust."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 16
"""Each holds a thread and a file descriptor, which a worker needs for its jobs."""
IDLE_S: Final = 10.0
"""A connection that sends or takes nothing for this long is closed."""

Answer = tuple[int, bytes, str]
"""Status, body and content type."""


class SmallServer(ThreadingHTTPServer):
    """Answers GET requests, one for each connection. More than :data:`MOST_CONNECTIONS` at once are
    closed without an answer."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, host: str, port: int, routes: dict[str, Callable[[str | None], Answer]]
    ) -> None:
        """``routes`` maps a path to what answers the header ``Accept``. Raises ``OSError`` if it
        cannot listen there."""
        self.routes = routes
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family, _, _, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        super().__init__((str(place[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:
            # No thread could start. A signal may end the process after one has, which releases too.
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            logger.error("a request for metrics failed: %r", error)
            return
        # The client is gone, or slow.
        logger.debug("a reader of metrics left: %r", error)


class _Handler(BaseHTTPRequestHandler):
    server: SmallServer
    timeout = IDLE_S
    server_version = "llorch"
    sys_version = ""

    def do_GET(self) -> None:
        answer = self.server.routes.get(self.path.partition("?")[0])
        if answer is None:
            places = ", ".join(self.server.routes)
            status, body, content_type = 404, f"here are: {places}\n".encode(), "text/plain"
        else:
            try:
                status, body, content_type = answer(self.headers.get("Accept"))
            except Exception:
                self.send_error(500)
                raise
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
