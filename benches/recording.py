"""Writes down what a client sends to a gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx

KEPT_HEADERS = ("content-type", "accept", "anthropic-version", "anthropic-beta")
"""Not whose and where they are."""


@contextmanager
def recorded(url: str, to: Path) -> Iterator[str]:
    """The URL of a server that passes requests on to ``url`` and writes each, a line of JSON, to
    ``to``."""
    target = urlsplit(url)
    to.unlink(missing_ok=True)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            sent = {name.lower(): value for name, value in self.headers.items()}
            headers = {name: sent[name] for name in KEPT_HEADERS if name in sent}
            line = {"path": self.path, "headers": headers, "body": json.loads(body)}
            with lock, to.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            place = f"{target.scheme}://{target.netloc}{self.path}"
            with httpx.stream("POST", place, content=body, headers=headers, timeout=600) as answer:
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.end_headers()
                for chunk in answer.iter_bytes():
                    self.wfile.write(chunk)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{target.path}"
        finally:
            server.shutdown()
            thread.join()
