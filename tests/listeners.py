"""Servers that are no Redis."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.services import LOCALHOST


@contextmanager
def silent_port() -> Iterator[tuple[int, Callable[[], list[socket.socket]]]]:
    """Accepts connections and never answers; a port, and what it has accepted."""
    with _served(lambda _: None) as (port, connections):
        yield port, lambda: connections


@contextmanager
def http_port() -> Iterator[int]:
    """Answers each connection as HTTP servers answer what they cannot read."""
    with _served(lambda each: each.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as (port, _):
        yield port


@contextmanager
def _served(answer: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[socket.socket]]]:
    connections: list[socket.socket] = []

    def serve(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connections.append(connection)
            answer(connection)

    with socket.create_server((LOCALHOST, 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield server.getsockname()[1], connections
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in connections:
                each.close()
