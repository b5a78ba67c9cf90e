"""What becomes of a job that is stopped before it reaches the engine."""

from __future__ import annotations

import pytest

from llorch_worker.broker.claims import Claim
from llorch_worker.contract import Cancelled
from llorch_worker.worker.delivery import Delivery
from llorch_worker.worker.job_runner import HandedBack
from llorch_worker.worker.residency import Residency
from tests.worker.conftest import JOB


def test_a_job_that_is_handed_back_before_it_runs_is_not_cancelled(
    residency: Residency, claim: Claim
) -> None:
    residency.active_jobs.expect(JOB)
    residency.active_jobs.hand_back(JOB)
    with pytest.raises(HandedBack):
        residency.job_runner.run(Delivery(JOB, {"prompt": "x"}))


def test_a_job_that_is_cancelled_before_it_runs_is_cancelled(
    residency: Residency, claim: Claim
) -> None:
    residency.active_jobs.expect(JOB)
    residency.active_jobs.cancel(JOB)
    with pytest.raises(Cancelled):
        residency.job_runner.run(Delivery(JOB, {"prompt": "x"}))


def test_a_job_that_begins_while_the_worker_leaves_is_handed_back(
    residency: Residency, claim: Claim
) -> None:
    residency.leave("a tensor moved")
    with pytest.raises(HandedBack):
        residency.job_runner.run(Delivery(JOB, {"prompt": "x"}))
