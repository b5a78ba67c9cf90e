"""A worker whose Redis is not there: it says so in one line, takes no job, and obeys SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from llorch_worker.client import Client
from tests.latch import Latch
from tests.listeners import http_port, silent_port
from tests.services import (
    LOCALHOST,
    STOP_TIMEOUT_S,
    RedisServer,
    WorkerProcess,
    begun,
    own_redis,
    running_worker,
    wait_until,
)

SILENT = "it accepts connections and never answers"
HTTP = "an HTTP server answers there"
PLAIN = "it answers without TLS, so use redis://"


@contextmanager
def silent() -> Iterator[str]:
    with silent_port() as (port, _):
        yield f"redis://{LOCALHOST}:{port}/0"


@contextmanager
def http() -> Iterator[str]:
    with http_port() as port:
        yield f"redis://{LOCALHOST}:{port}/0"


@contextmanager
def plain() -> Iterator[str]:
    with own_redis() as server:
        yield f"rediss://{LOCALHOST}:{server.port}/0"


@pytest.mark.parametrize(("place", "reason"), [(silent, SILENT), (http, HTTP), (plain, PLAIN)])
def test_a_worker_says_what_is_wrong_and_leaves_at_sigterm(
    place: Callable[[], AbstractContextManager[str]], reason: str, tmp_path: Path
) -> None:
    with place() as url:
        worker = WorkerProcess(url, tmp_path / "w1.log", model_name="toy")
        try:
            told = f"takes no jobs yet, will retry: No Redis at {url}: {reason}; correct"
            wait_until(lambda: told in worker.text(), what="the sentence")
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(STOP_TIMEOUT_S) == 0
        finally:
            worker.stop()
    assert worker.text().count("takes no jobs yet") == 1
    assert "Traceback" not in worker.text()


@contextmanager
def killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    yield


@pytest.mark.parametrize("gone", [killed, RedisServer.paused])
def test_a_worker_whose_redis_is_gone_for_good_leaves_after_its_time_to_drain(
    tmp_path: Path, latch: Latch, gone: Callable[[RedisServer], AbstractContextManager[None]]
) -> None:
    with (
        own_redis() as server,
        running_worker(server.url, tmp_path, model_name="toy", drain_s=1) as worker,
        Client(server.url, model="toy") as client,
    ):
        for _ in range(2):
            begun(client.submit(prompt=latch.prompt(), max_tokens=20))
        with gone(server):
            latch.open()
            wait_until(lambda: latch.ended() == 2, what="the jobs to end")
            worker.process.send_signal(signal.SIGTERM)
            # Its time to drain, and ten seconds.
            assert worker.wait_exit(11) == 0
    assert "Traceback" not in worker.text()
