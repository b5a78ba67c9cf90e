"""Workers that die, freeze, hang or shut down: their jobs go on elsewhere, once and complete."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from llorch_worker.broker import scripts
from llorch_worker.client import Client
from tests.faults.conftest import LEASE_S, QUICK, SWEEP_S, StartWorker
from tests.faults.proxy import FaultProxy, calls
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import wait_until
from tests.store import held_ids, waiting_ids

QUEUE = "llorch.toy"
RECOVERY_S = LEASE_S + SWEEP_S + 5.0
"""The promised time, and more for a busy machine; benches measure the promise itself."""
LONG = 4_000
"""More tokens than a test waits for."""


def waiting(client: Client) -> list[str]:
    """The ids in the queue, in the order of claiming."""
    return waiting_ids(client.redis)


# SIGKILL ------------------------------------------------------------------------------------------


def test_a_job_whose_worker_is_killed_is_resumed_by_another(
    start_worker: StartWorker, witness: Witness, latch: Latch
) -> None:
    first = start_worker("w1")
    jobs = [witness.begun(witness.send(300, latch.prompt(after=299)), 20) for _ in range(3)]
    first.process.kill()
    first.process.wait()
    latch.open()
    seen = [witness.tokens(job) for job in jobs]
    start_worker("w2", **QUICK)
    wait_until(
        lambda: all(witness.tokens(job) > before for job, before in zip(jobs, seen, strict=True)),
        timeout_s=RECOVERY_S,
    )
    witness.assert_whole(*jobs)
    for job in jobs:
        assert witness.runs(job) == ["w1@test", "w2@test"]
        assert job.result(0).attempts == 2


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_worker_killed_during_a_claim_loses_nothing(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy, lost: str
) -> None:
    # Redis knows the script, so the worker's first claim takes the job.
    scripts.load(client.redis, "claim")
    job = witness.send(20)
    a_claim = calls("claim")
    set_trap = proxy.lose_request if lost == "request" else proxy.lose_reply
    trap = set_trap(a_claim, freeze=True)
    first = start_worker("w1", url=proxy.url, ready=False)
    assert trap.wait(60)
    # The job is either in the queue or leased.
    assert waiting(client) == ([job.id] if lost == "request" else [])
    assert held_ids(client.redis) == (set() if lost == "request" else {job.id})
    first.process.kill()
    start_worker("w2")
    witness.assert_whole(job, timeout_s=RECOVERY_S)
    assert witness.runs(job) == ["w2@test"]
    assert job.result(0).attempts == (1 if lost == "request" else 2)


# SIGSTOP ------------------------------------------------------------------------------------------


def test_a_worker_that_wakes_after_its_lease_writes_nothing_and_goes_on_serving(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    make_latch: Callable[[str], Latch],
) -> None:
    stopped, end = make_latch("stopped"), make_latch("end")
    sleeper = start_worker("w1")
    # Neither ends before the worker stops, and both have tokens left to write when it wakes.
    long = witness.begun(witness.send(900, end.prompt(after=890)), 20)
    short = witness.begun(witness.send(200, stopped.prompt(after=190)), 20)
    sleeper.process.send_signal(signal.SIGSTOP)
    stopped.open()
    other = start_worker("w2", **QUICK)
    witness.assert_whole(short, timeout_s=RECOVERY_S)
    taken_over = wait_until(lambda: witness.runs(long)[1:])
    assert taken_over == ["w2@test"]
    record = witness.record(long)
    sleeper.process.send_signal(signal.SIGCONT)
    # The engine ended the short one while its keeper slept, and that end is dropped without a word.
    wait_until(lambda: f"lost the claim on job {long.id}" in sleeper.text())
    wait_until(lambda: f"[{long.id}] reject" in sleeper.text())
    # Its acknowledgements ended nothing either: the other worker still holds the job.
    assert held_ids(client.redis) == {long.id}
    fresh = witness.record(long)
    assert {fresh[name] for name in ("worker", "state")} == {"w2@test", "claimed"}
    assert fresh["fence"] == record["fence"]
    end.open()
    witness.assert_whole(short, long)
    for job in (short, long):
        assert witness.runs(job) == ["w1@test", "w2@test"]
        assert (job.result(0).worker, job.result(0).attempts) == ("w2@test", 2)
    other.process.kill()
    after = [witness.send(20) for _ in range(8)]
    witness.assert_whole(*after)
    assert {job.result(0).worker for job in after} == {"w1@test"}


# Hang ---------------------------------------------------------------------------------------------


def test_a_long_pause_of_the_whole_process_is_not_a_hang(
    start_worker: StartWorker, witness: Witness, latch: Latch
) -> None:
    worker = start_worker("w1", watchdog_s=1)
    job = witness.begun(witness.send(400, latch.prompt(after=399)), 10)
    worker.process.send_signal(signal.SIGSTOP)
    latch.open()
    start_worker("w2")
    wait_until(lambda: len(witness.runs(job)) == 2, timeout_s=RECOVERY_S)
    worker.process.send_signal(signal.SIGCONT)
    witness.assert_whole(job)
    assert worker.process.poll() is None
    assert "hangs" not in worker.text()


# Drain --------------------------------------------------------------------------------------------


def test_sigterm_finishes_short_jobs_and_hands_the_rest_back_in_order(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    make_latch: Callable[[str], Latch],
) -> None:
    soon, late = make_latch("soon"), make_latch("late")
    worker = start_worker("w1", drain_s=1, max_sequences=4)
    first, second, third = (
        witness.begun(witness.send(400, late.prompt(after=399)), 20) for _ in range(3)
    )
    short = witness.begun(witness.send(2, soon.prompt()))
    queued = witness.send(20)
    worker.process.terminate()
    wait_until(lambda: "Warm shutdown" in worker.text())
    soon.open()
    pushed = witness.send(20)
    assert worker.wait_exit() == 0
    late.open()
    assert witness.ended(short)
    assert short.result(0).worker == "w1@test"
    assert waiting(client) == [first.id, second.id, third.id, queued.id, pushed.id]
    assert not held_ids(client.redis)
    assert [witness.record(job)["attempts"] for job in (first, second, third)] == ["0"] * 3
    start_worker("w2", **QUICK)
    witness.assert_whole(first, second, third, short, queued, pushed)
    for job in (first, second, third):
        assert witness.runs(job) == ["w1@test", "w2@test"]
        assert job.result(0).attempts == 1


def test_jobs_that_come_while_workers_stop_are_never_lost(
    start_worker: StartWorker, witness: Witness, client: Client
) -> None:
    leaving = [start_worker(f"w{i}", ready=False, max_sequences=8) for i in range(3)]
    for worker in leaving:
        worker.wait_ready()
    jobs = []
    for worker in leaving:
        jobs += [witness.send(5) for _ in range(20)]
        worker.process.terminate()
        jobs += [witness.send(5) for _ in range(20)]
    assert [worker.wait_exit() for worker in leaving] == [0, 0, 0]
    assert not held_ids(client.redis)
    start_worker("last", max_sequences=16)
    witness.assert_whole(*jobs)
    assert {job.result(0).attempts for job in jobs} == {1}


def test_a_claim_that_is_lost_while_draining_is_not_handed_back_again(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy
) -> None:
    worker = start_worker("w1", url=proxy.url, drain_s=300)
    job = witness.begun(witness.send(LONG), 10)
    worker.process.terminate()
    wait_until(lambda: "Warm shutdown" in worker.text())
    proxy.hold()
    start_worker("w2")
    wait_until(lambda: len(witness.runs(job)) == 2, timeout_s=RECOVERY_S)
    proxy.heal()
    assert worker.wait_exit() == 0
    assert held_ids(client.redis) == {job.id}
    assert waiting(client) == []
    seen = witness.tokens(job)
    witness.begun(job, seen + 50)
    assert witness.runs(job) == ["w1@test", "w2@test"]
