"""Starts gateways for tests, as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services import REPOSITORY, STOP_TIMEOUT_S, tethered


@dataclass
class GatewayProcess:
    """A running ``llorch gateway``. Its log is the file ``log``."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def running_gateway(redis_url: str, folder: Path, **settings: object) -> Iterator[GatewayProcess]:
    """A gateway on a free port. ``settings`` are fields of ``GatewaySettings``."""
    variables = {f"LLORCH_GATEWAY_{name.upper()}": str(value) for name, value in settings.items()}
    variables.setdefault("LLORCH_GATEWAY_FILES", str(folder / "files"))
    log = folder / "gateway.log"
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            tethered(
                sys.executable,
                "-m",
                "llorch_worker.cli",
                "gateway",
                "--redis",
                redis_url,
                "--port",
                "0",
                "--json",
            ),
            cwd=REPOSITORY,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    assert process.stdout is not None
    try:
        lines = []
        while (line := process.stdout.readline()) not in (b"}\n", b""):
            lines.append(line)
        assert line, log.read_text()
        yield GatewayProcess(json.loads(b"".join([*lines, line]))["url"], log, process)
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
        process.stdout.close()
