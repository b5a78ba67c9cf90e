"""Redis becomes unreachable in many ways: jobs run on, and their output arrives once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_worker.broker import queues, scripts
from llorch_worker.client import Client
from tests.faults.conftest import LEASE_S, SWEEP_S, StartWorker
from tests.faults.proxy import FaultProxy, calls
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import START_TIMEOUT_S, RedisServer, WorkerProcess, wait_until
from tests.store import held_ids

SEQUENCES = 4
RECOVERY_S = LEASE_S + SWEEP_S + 8.0
"""Includes time to reconnect."""
ROOMY = {"lease_s": 4, "sweep_s": 1}
"""A lease that outlasts the fault, so that jobs stay with their worker."""


class Clock:
    """A condition that becomes true after ``after_s``, for faults that are only a duration."""

    def __init__(self, after_s: float) -> None:
        self._at_s = time.monotonic() + after_s

    def __call__(self) -> bool:
        return time.monotonic() >= self._at_s


def threads(worker: WorkerProcess) -> int:
    """The number of threads of the process."""
    return len(list(Path(f"/proc/{worker.process.pid}/task").iterdir()))


def assert_all_slots_serve(worker: WorkerProcess, witness: Witness, client: Client) -> None:
    """The worker runs as many jobs at once as before the fault, and then holds none."""
    with Latch(worker.log.with_suffix(".latch")) as latch:
        jobs = [witness.begun(witness.send(60, latch.prompt())) for _ in range(SEQUENCES)]
        assert held_ids(client.redis) == {job.id for job in jobs}
    witness.assert_whole(*jobs)
    wait_until(lambda: not held_ids(client.redis), what="the acknowledgements")


FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "reset": FaultProxy.reset,
    "isolate": FaultProxy.isolate,
    "hold": FaultProxy.hold,
    "blackhole": FaultProxy.blackhole,
    "delay": lambda proxy: proxy.delay(0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_jobs_run_on_through_a_broken_network_and_arrive_once(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    proxy: FaultProxy,
    make_latch: Callable[[str], Latch],
    fault: str,
) -> None:
    soon, late = make_latch("soon"), make_latch("late")
    worker = start_worker("w1", url=proxy.url, **ROOMY)
    ending = [witness.begun(witness.send(100, soon.prompt())) for _ in range(2)]
    lasting = [witness.begun(witness.send(300, late.prompt(after=299))) for _ in range(2)]
    FAULTS[fault](proxy)
    soon.open()
    soon.wait_ended(2)
    # Meanwhile two results cannot be stored, and two jobs run on.
    wait_until(Clock(0.7))
    proxy.heal()
    late.open()
    witness.assert_whole(*ending, *lasting)
    for job in (*ending, *lasting):
        assert witness.runs(job) == ["w1@test"], "it ran on"
        assert job.result(0).attempts == 1
    assert_all_slots_serve(worker, witness, client)


def test_a_redis_that_restarts_with_its_append_only_file_costs_nothing(
    own_server: RedisServer,
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    latch: Latch,
) -> None:
    worker = start_worker("w1", **ROOMY)
    jobs = [witness.begun(witness.send(300, latch.prompt(after=299)), 20) for _ in range(SEQUENCES)]
    queued = [witness.send(20) for _ in range(4)]
    own_server.halt()
    latch.open()
    own_server.start()
    witness.assert_whole(*jobs, *queued)
    for job in jobs:
        assert witness.runs(job) == ["w1@test"]
        assert job.result(0).attempts == 1
    assert_all_slots_serve(worker, witness, client)


def test_an_outage_longer_than_a_lease_costs_no_job_and_leaves_no_thread(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    proxy: FaultProxy,
    make_latch: Callable[[str], Latch],
) -> None:
    soon, late = make_latch("soon"), make_latch("late")
    worker = start_worker("w1", url=proxy.url)
    witness.assert_whole(*[witness.send(20) for _ in range(SEQUENCES)])
    before = threads(worker)
    # Two end during the outage, and at 5 ms a token two outlast it.
    ending = [witness.begun(witness.send(100, soon.prompt())) for _ in range(2)]
    lasting = [witness.begun(witness.send(900, late.prompt())) for _ in range(2)]
    start_worker("w2", url=proxy.url)
    proxy.isolate()
    soon.open()
    late.open()
    soon.wait_ended(2)
    wait_until(Clock(1.5 * LEASE_S))
    proxy.heal()
    assert not late.ended(), "both still run when Redis is back"
    witness.assert_whole(*ending, *lasting)
    for job in (*ending, *lasting):
        assert witness.runs(job) == ["w1@test"]
        assert job.result(0).attempts == 1
    wait_until(lambda: not held_ids(client.redis), what="the acknowledgements")
    wait_until(lambda: threads(worker) <= before, what="as few threads as before")


@pytest.mark.parametrize("cut_after_bytes", [0, 100])
def test_jobs_whose_claim_is_answered_in_vain_run_at_once_and_count_no_attempt(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy,
    cut_after_bytes: int,
) -> None:  # fmt: skip
    # Redis knows the script, so the first claim takes everything at once.
    scripts.load(client.redis, "claim")
    jobs = [witness.send(20) for _ in range(SEQUENCES)]
    trap = proxy.cut_reply(calls("claim"), cut_after_bytes)
    worker = start_worker("w1", url=proxy.url, ready=False, lease_s=600)
    assert trap.wait(START_TIMEOUT_S)
    witness.assert_whole(*jobs)
    assert {job.result(0).attempts for job in jobs} == {1}
    assert_all_slots_serve(worker, witness, client)


@pytest.mark.parametrize("script", ["append", "finish"])
@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_lost_write_is_repeated_and_takes_effect_once(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    proxy: FaultProxy,
    latch: Latch,
    script: str,
    lost: str,
) -> None:
    worker = start_worker("w1", url=proxy.url)
    witness.assert_whole(witness.send(20))
    job = witness.begun(witness.send(100, latch.prompt()))
    set_trap = proxy.lose_request if lost == "request" else proxy.lose_reply
    trap = set_trap(calls(script, job.id))
    latch.open()
    assert trap.wait(START_TIMEOUT_S)
    witness.assert_whole(job)
    assert job.result(0).attempts == 1
    assert_all_slots_serve(worker, witness, client)


def test_jobs_claimed_with_one_whose_delivery_fails_run(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy
) -> None:
    # Redis knows the scripts, so the first claim takes everything at once.
    scripts.load(client.redis, "claim")
    client.redis.lpush(queues.normal_queue("toy"), '{"headers": {"id": "no-envelope"}}')
    jobs = [witness.send(20) for _ in range(SEQUENCES - 1)]
    # One for each attempt of redis-py.
    traps = [proxy.lose_request(calls("bury")) for _ in range(20)]
    worker = start_worker("w1", url=proxy.url, ready=False)
    wait_until(lambda: "onnection to broker lost" in worker.text(), what="the delivery to fail")
    for trap in traps:
        proxy.disarm(trap)
    witness.assert_whole(*jobs, timeout_s=RECOVERY_S)
    assert_all_slots_serve(worker, witness, client)


def test_repeated_failures_during_an_outage_are_logged_once(
    start_worker: StartWorker, witness: Witness, proxy: FaultProxy, latch: Latch
) -> None:
    worker = start_worker("w1", url=proxy.url)
    job = witness.begun(witness.send(200, latch.prompt()))
    proxy.isolate()
    latch.open()
    wait_until(lambda: "Redis is away, will retry: " in worker.text())
    # Time for two reconnects and four renewals.
    wait_until(Clock(LEASE_S))
    proxy.heal()
    wait_until(lambda: "Redis serves again" in worker.text())
    witness.assert_whole(job)
    assert worker.text().count("will retry: ") == worker.text().count("Redis serves again") == 1


def test_a_worker_shut_down_during_an_outage_exits_and_its_jobs_go_on_elsewhere(
    start_worker: StartWorker,
    witness: Witness,
    proxy: FaultProxy,
    latch: Latch,
) -> None:
    worker = start_worker("w1", url=proxy.url, drain_s=0.5)
    job = witness.begun(witness.send(200, latch.prompt(after=199)), 20)
    doomed = witness.begun(witness.send(4000))
    # When the cancel ends this job, its tokens still wait to be written.
    assert proxy.lose_reply(calls("append", doomed.id)).wait(60)
    doomed.cancel()
    proxy.isolate()
    worker.process.terminate()
    worker.wait_exit()
    assert worker.text().count("shutting down, but Redis is unreachable: ") == 1
    latch.open()
    start_worker("w2")
    witness.assert_whole(job, timeout_s=RECOVERY_S)
    assert job.result(0).worker == "w2@test"
