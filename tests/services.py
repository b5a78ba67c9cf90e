"""Real services for tests: a redis-server and worker processes, each test process its own."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import redis

from llorch_worker.broker import registry
from llorch_worker.broker.connection import connect
from llorch_worker.broker.embedded import RedisServer

REPOSITORY = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
WAIT_TIMEOUT_S = 30.0
TOY_APP = "tests.toy_app"
REAL_APP = "tasks"
PR_SET_PDEATHSIG = 1

T = TypeVar("T")


def wait_until(look: Callable[[], T], *, timeout_s: float = WAIT_TIMEOUT_S, what: str = "") -> T:
    """What ``look`` returns, once that is true; fails the test when it takes too long."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > give_up_s:
            raise AssertionError(f"waited {timeout_s} s for {what or look}; last saw {found!r}")
        time.sleep(0.01)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def environment(redis_url: str, **settings: object) -> dict[str, str]:
    """The environment of a process with these ``LLORCH_*`` settings; other names go in as are."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("LLORCH_")}
    clean |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    clean["LLORCH_REDIS_URL"] = redis_url
    for name, value in settings.items():
        key = name if name.isupper() else f"LLORCH_{name.upper()}"
        clean[key] = str(value)
    return clean


class WorkerProcess:
    """``celery -A <app> worker`` as a process of its own, with its log in a file."""

    def __init__(
        self,
        redis_url: str,
        log: Path,
        *,
        app: str = TOY_APP,
        name: str = "w1",
        loglevel: str = "INFO",
        options: tuple[str, ...] = (),
        **settings: object,
    ) -> None:
        self.redis_url = redis_url
        self.log = log
        self.hostname = f"{name}@test"
        command = [
            sys.executable, "-m", "celery", "-A", app, "worker", "-n", self.hostname,
            "-l", loglevel, "--without-gossip", "--without-mingle", *options,
        ]  # fmt: skip
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment(redis_url, **settings),
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait_ready(self) -> WorkerProcess:
        """Until the worker consumes. Fails where it exits instead."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode}:\n{self.text()}")
            return f"{self.hostname} ready." in self.text() or self._consumes()

        wait_until(ready, timeout_s=START_TIMEOUT_S, what="the worker to be ready")
        return self

    def _consumes(self) -> bool:
        # At log levels above INFO there is no line to wait for.
        with connect(self.redis_url) as client:
            names = [c["cmd"] for c in client.client_list()]
            return self.card() is not None and "brpop" in names

    def card(self) -> registry.WorkerCard | None:
        with connect(self.redis_url) as client:
            cards = {card.hostname: card for card in registry.workers(client)}
        return cards.get(self.hostname)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """SIGTERM, and SIGKILL where that does not help; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


@contextmanager
def running_worker(redis_url: str, folder: Path, **options: Any) -> Iterator[WorkerProcess]:
    """A ready worker, gone afterwards."""
    name = options.get("name", "w1")
    worker = WorkerProcess(redis_url, folder / f"{name}.log", **options)
    try:
        yield worker.wait_ready()
    finally:
        worker.stop()


@contextmanager
def own_redis(*, append_only: bool = False) -> Iterator[RedisServer]:
    """A redis-server for one test alone."""
    with RedisServer(append_only=append_only) as server:
        yield server


def run_python(source: str, redis_url: str, **settings: object) -> Any:
    """Runs ``source`` in a fresh interpreter; the JSON of the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=REPOSITORY,
        env=environment(redis_url, **settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def unacked(client: redis.Redis) -> int:
    """Messages that workers hold."""
    return int(client.hlen("unacked"))


def secret_free(text: str, *secrets: str) -> bool:
    """Whether none of ``secrets`` is in ``text``, in any case."""
    return not any(re.search(re.escape(secret), text, re.IGNORECASE) for secret in secrets)
