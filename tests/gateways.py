"""Starts gateways for tests, as users start them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services import STOP_TIMEOUT_S, Process, start_python, url_once_it_listens


@dataclass
class GatewayProcess:
    """A running ``llorch gateway``. Its log is the file ``log``."""

    url: str
    log: Path
    process: Process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def running_gateway(
    redis_url: str, folder: Path, *, fresh: bool = False, **settings: object
) -> Iterator[GatewayProcess]:
    """A gateway on a free port; a fork, unless it is ``fresh``. ``settings`` are fields of
    ``GatewaySettings``."""
    variables = {f"LLORCH_GATEWAY_{name.upper()}": str(value) for name, value in settings.items()}
    variables.setdefault("LLORCH_GATEWAY_FILES", str(folder / "files"))
    log, out = folder / "gateway.log", folder / "gateway.json"
    out.unlink(missing_ok=True)
    command = ("llorch_worker.cli", "gateway", "--redis", redis_url, "--port", "0", "--json")
    process = start_python(
        *command, variables=os.environ | variables, log=log, out=out, fresh=fresh
    )

    try:
        yield GatewayProcess(url_once_it_listens(process, out, log), log, process)
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
