"""The faults of docs/RELIABILITY.md with the default lease; each test takes about a minute.

They run only on request: ``LLORCH_FULL_SIZE=1 python -m pytest tests/faults/test_full_size.py``.
Without the variable they are not collected. The files beside this one test the same faults with a
shorter lease.
"""

from __future__ import annotations

import signal
from random import Random

import pytest

from llorch_worker.client import Client, Job
from llorch_worker.settings import Settings
from tests.faults.conftest import StartWorker
from tests.faults.proxy import FaultProxy
from tests.faults.test_partition import Clock, assert_all_slots_serve
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import wait_until

DEFAULTS = Settings()
FULL = {"lease_s": DEFAULTS.lease_s, "sweep_s": DEFAULTS.sweep_s}
RECOVERY_S = 15.0
"""As promised in docs/RELIABILITY.md."""
AFTERWARDS_S = 90.0
BACKLOG_JOBS = 12


def test_a_killed_workers_job_goes_on_within_15_s(
    start_worker: StartWorker, witness: Witness
) -> None:
    doomed = start_worker("w1", **FULL)
    job = witness.begun(witness.send(2000), 50)
    start_worker("w2", **FULL)
    doomed.process.kill()
    wait_until(lambda: witness.runs(job)[1:], timeout_s=RECOVERY_S)
    witness.assert_whole(job, timeout_s=AFTERWARDS_S)


def test_a_worker_stopped_for_60_s_writes_nothing_when_it_wakes(
    start_worker: StartWorker, witness: Witness
) -> None:
    sleeper = start_worker("w1", **FULL)
    job = witness.begun(witness.send(1000), 50)
    sleeper.process.send_signal(signal.SIGSTOP)
    start_worker("w2", **FULL)
    wait_until(Clock(60), timeout_s=70)
    witness.assert_whole(job)
    sleeper.process.send_signal(signal.SIGCONT)
    wait_until(lambda: f"lost the claim on job {job.id}" in sleeper.text())
    witness.assert_whole(job)
    assert job.result(0).worker == "w2@test"
    assert sleeper.process.poll() is None


@pytest.mark.parametrize("fault", ["blackhole", "delay"])
def test_a_redis_behind_a_bad_network_for_30_s(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy, fault: str
) -> None:
    worker = start_worker("w1", url=proxy.url, **FULL)
    jobs = [witness.begun(witness.send(tokens)) for tokens in (300, 2000)]
    if fault == "blackhole":
        proxy.blackhole()
    else:
        proxy.delay(5.0)
    wait_until(Clock(30), timeout_s=40)
    proxy.heal()
    witness.assert_whole(*jobs, timeout_s=AFTERWARDS_S)
    assert_all_slots_serve(worker, witness, client)


def test_results_that_cannot_be_stored_for_60_s(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy, latch: Latch
) -> None:
    worker = start_worker("w1", url=proxy.url, **FULL)
    jobs = [witness.begun(witness.send(200, latch.prompt())) for _ in range(2)]
    proxy.isolate()
    latch.open()
    latch.wait_ended(2)
    wait_until(Clock(60), timeout_s=70)
    proxy.heal()
    witness.assert_whole(*jobs, timeout_s=AFTERWARDS_S)
    assert_all_slots_serve(worker, witness, client)


def test_connections_that_break_at_any_byte_for_60_s(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy
) -> None:
    random = Random(1)
    workers = [start_worker(name, url=proxy.url, **FULL) for name in ("w1", "w2")]
    # From a hundred bytes, not enough to connect, to thirty kilobytes.
    proxy.wear_out(lambda: int(10 ** random.uniform(2, 4.5)))
    proxy.reset()
    over = Clock(60)
    jobs: list[Job] = []
    while not over():
        if sum(not witness.ended(job) for job in jobs[-BACKLOG_JOBS:]) < BACKLOG_JOBS:
            jobs.append(witness.send(random.randrange(5, 300)))
        wait_until(Clock(0.05))
    proxy.wear_out(None)
    witness.assert_whole(*jobs, timeout_s=AFTERWARDS_S)
    for worker in workers:
        assert worker.process.poll() is None
    workers[1].stop()
    assert_all_slots_serve(workers[0], witness, client)
