"""What systemd and probes learn of a worker: sd_notify's datagrams and the age of a file."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llorch_worker.client import Client
from llorch_worker.worker.signs_of_life import ServiceManager, SignsOfLife
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, begun, running_worker

BEAT_S = 0.1
SEVERAL_BEATS_S = 10 * BEAT_S
WATCHDOG_USEC = round(2 * BEAT_S * 1e6)
GET_S = 60


class Systemd:
    """Its end of the socket, and what it puts into a service's environment."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(WATCHDOG_USEC)}

    def hears(self, assignment: str, timeout_s: float = GET_S) -> list[str]:
        """Everything up to the datagram with a line that begins so; raises TimeoutError."""
        heard: list[str] = []
        until_s = time.monotonic() + timeout_s
        while not any(line.startswith(assignment) for line in heard):
            self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            heard += self._socket.recv(4096).decode().split("\n")
            if time.monotonic() > until_s:
                raise TimeoutError(f"{assignment!r} is not among {heard[-6:]}")
        return heard

    def is_silent(self, for_s: float) -> bool:
        try:
            self.hears("WATCHDOG=1", for_s)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    found = Systemd(tmp_path / "notify")
    yield found
    found.close()


@contextmanager
def watched_worker(
    systemd: Systemd, redis_server: RedisServer, folder: Path, **changed: object
) -> Iterator[tuple[WorkerProcess, Path]]:
    file = folder / "alive"
    file.touch()
    options = {"model_name": "toy", "max_sequences": 2, "health_file": file, "TOY_LOAD_S": 0.1}
    options |= changed
    with running_worker(redis_server.url, folder, **options, **systemd.environment) as worker:
        yield worker, file


def test_a_worker_is_ready_once_it_takes_jobs_and_advances_until_it_has_drained(
    systemd: Systemd,
    redis_server: RedisServer,
    client: Client,
    make_latch: Callable[[str], Latch],
    tmp_path: Path,
) -> None:
    with watched_worker(systemd, redis_server, tmp_path) as (worker, file):
        before = systemd.hears("READY=1")
        assert before[0] == "STATUS=loading toy"
        assert "WATCHDOG=1" not in before
        systemd.hears("WATCHDOG=1")
        systemd.hears("STATUS=toy on cpu: 0 running, 0 waiting, 0 tokens/s")
        assert file.exists()
        latch = make_latch("latch")
        job = begun(client.submit(prompt=latch.prompt(1), max_tokens=3))
        worker.process.send_signal(signal.SIGTERM)
        systemd.hears("STOPPING=1")
        systemd.hears("WATCHDOG=1")
        latch.open()
        assert job.result(GET_S).usage.completion == 3
        assert worker.wait_exit() == 0
        assert not file.exists()


def test_a_worker_whose_engine_hangs_shows_that_it_lives(
    systemd: Systemd, redis_server: RedisServer, client: Client, tmp_path: Path
) -> None:
    """Another engine costs less than another worker: see its watchdog."""
    with watched_worker(systemd, redis_server, tmp_path) as (worker, file):
        systemd.hears("READY=1")
        client.submit(prompt="hang", max_tokens=3)
        systemd.hears("STATUS=toy on cpu: 1 running, 0 waiting, 0 tokens/s")
        shown = file.stat().st_mtime_ns
        for _ in range(3):
            systemd.hears("WATCHDOG=1")
        assert file.stat().st_mtime_ns > shown
        worker.process.kill()


def test_a_worker_without_an_engine_says_so(
    systemd: Systemd, redis_server: RedisServer, client: Client, tmp_path: Path
) -> None:
    with watched_worker(systemd, redis_server, tmp_path, TOY_LOAD_S=0.5) as (worker, _):
        systemd.hears("READY=1")
        os.kill(worker.engine_pid(), signal.SIGSEGV)
        systemd.hears("STATUS=toy on cpu: the engine died: signal SIGSEGV; it starts again now")
        systemd.hears("STATUS=toy on cpu: 0 running, 0 waiting, 0 tokens/s")


def test_a_service_manager_that_is_gone_or_full_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    manager = ServiceManager({"NOTIFY_SOCKET": str(path)})
    manager.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unread:
        unread.bind(str(path))
        for _ in range(10_000):
            manager.notify("WATCHDOG=1")


def test_an_abstract_socket_is_found_and_another_process_watchdog_is_not_ours() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind("")
        name = abstract.getsockname().decode().replace("\0", "@")
        told = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000"}
        ServiceManager(told).notify("READY=1", "STATUS=x")
        assert abstract.recv(64) == b"READY=1\nSTATUS=x"
    assert ServiceManager(told).watchdog_s == 1.0
    assert ServiceManager(told | {"WATCHDOG_PID": str(os.getpid())}).watchdog_s == 1.0
    assert ServiceManager(told | {"WATCHDOG_PID": "1"}).watchdog_s is None


def test_a_health_file_that_cannot_be_written_is_noticed_before_the_load(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SignsOfLife(tmp_path / "missing" / "alive")
