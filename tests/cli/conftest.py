"""One Redis and one worker for all tests of the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import Served
from tests.services import REAL_APP, WorkerProcess, own_redis, running_worker


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    """The tests choose every setting themselves."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LLORCH_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis on a free port."""
    with own_redis() as server:
        yield server.url


@pytest.fixture(scope="session")
def served_worker(
    redis_url: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """One worker for the whole session, serving the demo model."""
    folder = tmp_path_factory.mktemp("served")
    with running_worker(redis_url, folder, app=REAL_APP, model=demo_model) as worker:
        yield worker
        assert worker.stop() == 0, worker.text()


@pytest.fixture(scope="session")
def served(redis_url: str, served_worker: WorkerProcess, demo_model: Path) -> Served:
    """What ``served_worker`` serves."""
    return Served(redis_url, demo_model.stem)
