"""Workers that die, freeze, hang or are told to go: their jobs go on elsewhere, once and whole."""

from __future__ import annotations

from llorch_worker.settings import Settings
from tests.faults.conftest import LEASE_S, SWEEP_S, StartWorker
from tests.faults.witness import Witness
from tests.services import wait_until

MARGIN_S = 5.0
"""What a busy machine may add to a promised time; the promise itself is measured in benches."""


def test_a_dead_workers_jobs_are_resumed_within_15_s_by_default() -> None:
    settings = Settings()
    assert settings.lease_s + settings.sweep_s == 15


def test_a_job_whose_worker_is_killed_is_resumed_by_another(
    start_worker: StartWorker, witness: Witness
) -> None:
    first = start_worker("w1")
    jobs = [witness.send(300) for _ in range(3)]
    for job in jobs:
        witness.begun(job, 20)
    start_worker("w2")
    seen = [witness.tokens(job) for job in jobs]
    first.process.kill()
    wait_until(
        lambda: all(witness.tokens(job) > before for job, before in zip(jobs, seen, strict=True)),
        timeout_s=LEASE_S + SWEEP_S + MARGIN_S,
    )
    witness.assert_whole(*jobs)
    for job in jobs:
        assert witness.runs(job) == ["w1@test", "w2@test"]
        assert job.result(0).attempts == 2
