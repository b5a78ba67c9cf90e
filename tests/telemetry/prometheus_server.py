"""A real Prometheus, which scrapes everything every second."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services import LOCALHOST, STOP_TIMEOUT_S, free_port, tethered
from tests.waiting import wait_until

SCRAPE_INTERVAL = "1s"


class Prometheus:
    """Answers queries."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30)

    def values(self, query: str, at_s: float | None = None) -> list[tuple[dict[str, str], float]]:
        """The labels and value of each series, now or at a Unix time."""
        parameters = {"query": query} | ({} if at_s is None else {"time": str(at_s)})
        answer = self._http.get("/api/v1/query", params=parameters).json()
        assert answer["status"] == "success", answer
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    def value(self, query: str, at_s: float | None = None) -> float:
        """The value of the only series; NaN without one."""
        found = self.values(query, at_s)
        assert len(found) <= 1, found
        return found[0][1] if found else float("nan")

    def rules(self) -> list[dict[str, Any]]:
        """Its rules, with their health."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def running_prometheus(
    folder: Path, *, targets_url: str, static: Sequence[str]
) -> Iterator[Prometheus]:
    """Scrapes the workers that ``targets_url`` lists, and the ``static`` ones, ``host:port``."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL},
        "scrape_configs": [
            {
                "job_name": "workers",
                "http_sd_configs": [{"url": targets_url, "refresh_interval": "1s"}],
            },
            {"job_name": "others", "static_configs": [{"targets": list(static)}]},
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # YAML contains JSON
    with running_server(file, folder) as server:
        yield server


@contextmanager
def running_server(config: Path, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with this configuration, which keeps its data and its log in ``folder``."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("needs Prometheus: apt-get install prometheus")
    address = f"{LOCALHOST}:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            tethered(
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ),
            stdout=log,
            stderr=log,
        )
    try:
        server = Prometheus(f"http://{address}")
        wait_until(server.ready, timeout_s=60, what="Prometheus to be ready")
        yield server
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
