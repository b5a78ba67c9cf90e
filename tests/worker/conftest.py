"""What tests of a worker's parts share: everything around an engine, without Celery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.connection import connect
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.settings import Settings
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.residency import Residency
from tests.services import RedisServer
from tests.toy_engine import ToyEngine

JOB = "job"
"""The job of ``claim``."""


@pytest.fixture
def residency(redis_server: RedisServer) -> Iterator[Residency]:
    settings = Settings(redis_url=redis_server.url)
    residency = Residency(
        ToyEngine("toy", 2, 4096), settings, "w@test", ActiveJobs(), on_broken=lambda: None
    )
    residency.start()
    yield residency
    residency.close()


@pytest.fixture
def claim(redis_server: RedisServer) -> Iterator[Claim]:
    claim = Claim(
        job_id=JOB,
        message=b"",
        attempt=1,
        fence=1,
        list_key="",
        suspect=False,
        first_claimed_ms=0,
        claimed_ms=0,
        first=True,
    )
    with connect(redis_server.url) as store:
        store.hset(keys.job(JOB), mapping={"state": "claimed", "fence": 1, "progress": 0})
        HELD_CLAIMS.add(claim)
        yield claim
        HELD_CLAIMS.discard(claim)
        store.delete(keys.job(JOB), keys.events(JOB))
