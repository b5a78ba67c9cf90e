"""A TCP proxy before a server, for faults of the network."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

LOCALHOST = "127.0.0.1"


class AnswerLosingProxy:
    """Passes everything on, but when told to, lets the server do what it was asked and then cuts
    the connection instead of passing the answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server((LOCALHOST, 0))
        self.url = f"redis://{LOCALHOST}:{self._listener.getsockname()[1]}/0"
        self.lost = 0
        self._lose = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next_answer(self) -> None:
        self._lose.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for open_socket in (self._listener, *self._sockets):
            open_socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((LOCALHOST, self._port))
                self._sockets += [near, far]
                for args in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass_on, args=args, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if answers and self._lose.is_set():
                    self._lose.clear()
                    self.lost += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
