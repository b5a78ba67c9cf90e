"""A worker whose terminal's window is closed drains."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from llorch_worker.broker.fleet import registry
from llorch_worker.client import Client
from tests.latch import Latch
from tests.services import (
    QUICK_START,
    REPOSITORY,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    TOY_APP,
    RedisServer,
    begun,
    environment,
    wait_until,
)


class Window:
    """A worker in the foreground of a terminal."""

    def __init__(self, redis_url: str) -> None:
        self._window, terminal = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", TOY_APP, "worker", "-n", "w@test", *QUICK_START],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=REPOSITORY,
            env=environment(redis_url, model_name="toy", TOY_STEP_MS=1),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)
        self._shown = threading.Thread(target=self._show, daemon=True)
        self._is_open = True
        self._shown.start()

    def _show(self) -> None:
        with suppress(OSError):
            while self._is_open:
                if select.select([self._window], [], [], 0.1)[0]:
                    os.read(self._window, 65_536)
        os.close(self._window)

    def close(self) -> None:
        self._is_open = False
        self._shown.join()


@pytest.fixture
def window(own_server: RedisServer) -> Iterator[Window]:
    window = Window(own_server.url)
    yield window
    if window.process.poll() is None:
        window.process.kill()
        window.process.wait()


def test_its_running_jobs_end_and_it_leaves(
    window: Window, own_client: Client, latch: Latch
) -> None:
    wait_until(lambda: registry.workers(own_client.redis), timeout_s=START_TIMEOUT_S)
    job = begun(own_client.submit(prompt=latch.prompt(after=5), max_tokens=20))
    window.close()
    latch.open()
    result = job.result(STOP_TIMEOUT_S)
    assert (result.worker, result.attempts) == ("w@test", 1)
    assert window.process.wait(STOP_TIMEOUT_S) == 0
