"""A gateway in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from llorch_worker.gateway.app import create_app
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.settings import Settings


@contextmanager
def serving(redis_url: str, files: Path) -> Iterator[str]:
    """The URL of a gateway on a free port, which keeps its files in ``files``."""
    own = GatewaySettings(host="127.0.0.1", port=0, keys=None, files=str(files))
    app = create_app(Settings(redis_url=redis_url), own)
    config = uvicorn.Config(app, own.host, own.port, http="h11", log_config=None)
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],), name="llorch-stub-gateway")
    thread.start()
    try:
        # Connections wait until the server accepts them.
        socket.listen()
        yield f"http://{own.host}:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
