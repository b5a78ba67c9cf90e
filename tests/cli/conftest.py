"""One Redis and one worker for all tests of the command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import Served, Started
from tests.services import own_redis


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
def served(redis_url: str, demo_model: Path) -> Iterator[Served]:
    """One worker for the whole session, serving the demo model."""
    worker = Started("worker", "--redis", redis_url, "--model", demo_model)
    worker.wait_for("ready.")
    yield Served(redis_url, demo_model.stem)
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0, worker.lines
