"""What becomes of a job that is stopped before it reaches the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.connection import connect
from llorch_worker.broker.held import HELD
from llorch_worker.contract import Cancelled
from llorch_worker.settings import Settings
from llorch_worker.worker.job_runner import HandedBack
from llorch_worker.worker.residency import Residency
from tests.services import RedisServer
from tests.toy_engine import ToyEngine

JOB = "early"


@pytest.fixture
def residency(redis_server: RedisServer) -> Iterator[Residency]:
    settings = Settings(redis_url=redis_server.url)
    residency = Residency(ToyEngine("toy", 2, 4096), settings, "w@test", on_broken=lambda: None)
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
    HELD.add(claim)
    with connect(redis_server.url) as store:
        store.hset(keys.job(JOB), mapping={"state": "claimed", "fence": 1, "progress": 0})
        yield claim
        forget(store)
    HELD.discard(claim)


def forget(store: redis.Redis) -> None:
    store.delete(keys.job(JOB), keys.events(JOB))


def test_a_job_that_is_handed_back_before_it_runs_is_not_cancelled(
    residency: Residency, claim: Claim
) -> None:
    residency.running.expect(JOB)
    residency.hand_back(JOB)
    with pytest.raises(HandedBack):
        residency.jobs.generate(JOB, (), {"prompt": "x"})


def test_a_job_that_is_cancelled_before_it_runs_is_cancelled(
    residency: Residency, claim: Claim
) -> None:
    residency.running.expect(JOB)
    residency.cancel(JOB)
    with pytest.raises(Cancelled):
        residency.jobs.generate(JOB, (), {"prompt": "x"})
