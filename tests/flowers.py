"""Starts Flower for tests, as ``llorch up`` starts it."""

from __future__ import annotations

import base64
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from llorch_worker.settings import Settings
from llorch_worker.stack import programs
from tests.services import REPOSITORY, START_TIMEOUT_S, environment, free_port, tethered
from tests.waiting import wait_until

END_S = 30
LOGIN = "operator:secret"


class Flower:
    """Flower as ``llorch up`` starts it, with persistence as in the compose file."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = Settings(redis_url=redis_url, model_name="toy")
        self._program = programs.flower(port, settings, LOGIN)
        self._environment = environment(redis_url) | dict(
            self._program.environment,
            FLOWER_PERSISTENT="true",
            FLOWER_DB=str(folder / "kept"),
            FLOWER_STATE_SAVE_INTERVAL="200",
        )
        self._folder = folder
        self._log = folder / "flower.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                tethered(*self._program.command),
                cwd=REPOSITORY,
                env=self._environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        wait_until(self.answers, timeout_s=START_TIMEOUT_S, what="Flower")

    def kill(self) -> None:
        """Told to stop, it may wait half a minute for a thread of its own."""
        self._process.kill()
        self._process.wait(END_S)

    def saved_at_ns(self) -> int:
        # The library that keeps the file may add a suffix to its name.
        files = [file for file in self._folder.glob("kept*") if "tmp" not in file.name]
        return max((file.stat().st_mtime_ns for file in files), default=0)

    def wait_saved(self) -> None:
        """Waits until all that Flower knows now is in its file."""
        # The first save to end may have begun before.
        for _ in range(2):
            known_ns = time.time_ns()
            wait_until(partial(self._saved_since, known_ns), what="Flower to save its state")

    def _saved_since(self, known_ns: int) -> bool:
        return self.saved_at_ns() > known_ns

    def get(self, path: str, **headers: str) -> str:
        return self._open(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, **fields: str) -> str:
        data = urllib.parse.urlencode(fields).encode()
        return self._open(urllib.request.Request(self.url + path, data=data))

    def task(self, job_id: str) -> dict[str, Any]:
        """What Flower knows of a task; nothing before its first event came."""
        try:
            found: dict[str, Any] = json.loads(self.get(f"/api/task/info/{job_id}"))
        except HTTPError:
            return {}
        return found

    def ended(self, job_id: str, state: str) -> dict[str, Any]:
        wait_until(lambda: self.task(job_id).get("state") == state)
        return self.task(job_id)

    def answers(self) -> bool:
        try:
            return bool(self.get("/healthcheck"))
        except OSError:
            return False

    def _open(self, request: urllib.request.Request) -> str:
        login = base64.b64encode(LOGIN.encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {login}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())


@contextmanager
def running_flower(redis_url: str, folder: Path) -> Iterator[Flower]:
    """A Flower that answers, which ends with the context."""
    flower = Flower(redis_url, folder)
    try:
        yield flower
    finally:
        flower.kill()
