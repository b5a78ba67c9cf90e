"""Starts exporters for tests, as users start them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services import START_TIMEOUT_S, STOP_TIMEOUT_S, start_python
from tests.waiting import wait_until


@contextmanager
def running_exporter(redis_url: str, folder: Path) -> Iterator[str]:
    """The URL of an exporter on a free port. It must end with 0 at the end of the context."""
    log, out = folder / "exporter.log", folder / "exporter.json"
    command = ("llorch_worker.cli", "exporter", "--redis", redis_url, "--port", "0", "--json")
    process = start_python(*command, variables=os.environ, log=log, out=out)

    def document() -> str:
        assert process.poll() is None, log.read_text()
        text = out.read_text() if out.exists() else ""
        return text if text.endswith("}\n") else ""

    try:
        text = wait_until(document, timeout_s=START_TIMEOUT_S, what="the exporter to listen")
        yield str(json.loads(text)["url"])
    finally:
        process.terminate()
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()
