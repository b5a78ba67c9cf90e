"""What becomes of a job that is stopped before it reaches the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.connection import connect
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.contract import Cancelled
from llorch_worker.settings import Settings
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.delivery import Delivery
from llorch_worker.worker.job_runner import HandedBack
from llorch_worker.worker.residency import Residency
from tests.services import RedisServer
from tests.toy_engine import ToyEngine

JOB = Delivery("job", {"prompt": "x"})


@pytest.fixture
def active_jobs() -> ActiveJobs:
    jobs = ActiveJobs()
    jobs.expect(JOB.job_id)
    return jobs


@pytest.fixture
def residency(redis_server: RedisServer, active_jobs: ActiveJobs) -> Iterator[Residency]:
    """A toy engine with all that surrounds it but Celery, and a claim on ``JOB``."""
    settings = Settings(redis_url=redis_server.url)
    engine, device = ToyEngine("toy", 2, 4096), Assignment("toy")
    residency = Residency(engine, settings, "w@test", active_jobs, device, on_broken=lambda: None)
    claim = Claim(
        job_id=JOB.job_id,
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
        store.hset(keys.job(JOB.job_id), mapping={"state": "claimed", "fence": 1, "progress": 0})
        HELD_CLAIMS.add(claim)
        residency.start()
        yield residency
        residency.close()
        HELD_CLAIMS.discard(claim)
        store.delete(keys.job(JOB.job_id), keys.events(JOB.job_id))


def test_a_job_that_is_handed_back_before_it_runs_is_not_cancelled(
    residency: Residency, active_jobs: ActiveJobs
) -> None:
    active_jobs.hand_back(JOB.job_id)
    with pytest.raises(HandedBack):
        residency.job_runner.run(JOB)


def test_a_job_that_is_cancelled_before_it_runs_is_cancelled(
    residency: Residency, active_jobs: ActiveJobs
) -> None:
    active_jobs.cancel(JOB.job_id)
    with pytest.raises(Cancelled):
        residency.job_runner.run(JOB)


def test_a_job_that_begins_while_the_worker_leaves_is_handed_back(
    residency: Residency, active_jobs: ActiveJobs
) -> None:
    active_jobs.forget(JOB.job_id)
    residency.leave("a tensor moved")
    with pytest.raises(HandedBack):
        residency.job_runner.run(JOB)
