"""Starts a Prometheus for tests, which dies with them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services import LOCALHOST, START_TIMEOUT_S, STOP_TIMEOUT_S, free_port, tethered
from tests.waiting import wait_until

QUERY_TIMEOUT_S = 10.0


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=QUERY_TIMEOUT_S).is_success
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that ``expression`` has now. Fails the test if Prometheus refuses it."""
        return self._get("query", query=expression)["result"]  # type: ignore[no-any-return]

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes."""
        return self._get("targets")["activeTargets"]  # type: ignore[no-any-return]

    def rules(self) -> list[dict[str, Any]]:
        """Its rules, with their health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}"
        answer = httpx.get(url, params=parameters, timeout=QUERY_TIMEOUT_S)
        document = answer.json()
        assert document["status"] == "success", (parameters, document)
        return document["data"]


@contextmanager
def running_prometheus(config: Path, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus on a free port that keeps its data and its log in ``folder``."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("needs prometheus on the PATH")
    address = f"{LOCALHOST}:{free_port()}"
    command = tethered(
        binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}", "--log.level=warn",
    )  # fmt: skip
    log = folder / "prometheus.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    server = Prometheus(f"http://{address}")

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        return server.ready()

    try:
        wait_until(ready, timeout_s=START_TIMEOUT_S, what="Prometheus")
        yield server
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
