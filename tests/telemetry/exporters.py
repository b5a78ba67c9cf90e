"""Starts exporters for tests, as users start them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services import STOP_TIMEOUT_S, start_python, url_once_it_listens


@contextmanager
def running_exporter(redis_url: str, folder: Path) -> Iterator[str]:
    """The URL of an exporter on a free port. It must end with 0 at the end of the context."""
    log, out = folder / "exporter.log", folder / "exporter.json"
    command = ("llorch_worker.cli", "exporter", "--redis", redis_url, "--port", "0", "--json")
    process = start_python(*command, variables=os.environ, log=log, out=out)

    try:
        yield url_once_it_listens(process, out, log)
    finally:
        process.terminate()
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()
