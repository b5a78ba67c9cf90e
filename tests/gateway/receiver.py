"""A receiver of webhooks, which fails as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks import Webhook


@dataclass
class Delivery:
    path: str
    headers: dict[str, str]
    body: bytes

    def verified(self, secret: str) -> dict[str, Any]:
        """The document; raises if the signature is wrong."""
        document: dict[str, Any] = Webhook(secret).verify(self.body, self.headers)
        return document

    @property
    def document(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


Respond = Callable[[BaseHTTPRequestHandler, int], None]
"""Answers an attempt, given its number from 0."""


@dataclass
class Receiver:
    url: str
    deliveries: list[Delivery] = field(default_factory=list)


@contextmanager
def running_receiver(respond: Respond | None = None) -> Iterator[Receiver]:
    """Answers 204 by default."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                number = len(receiver.deliveries)
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.deliveries.append(Delivery(self.path, headers, body))
            (respond or status(204))(self, number)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}/hook?a=b")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def status(code: int, **headers: str) -> Respond:
    def respond(handler: BaseHTTPRequestHandler, number: int) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", "0")
        handler.end_headers()

    return respond


def failing(times: int) -> Respond:
    """Answers 500 the first ``times``."""
    return lambda handler, number: status(500 if number < times else 204)(handler, number)
