"""Redis that goes away, in every way: jobs run on, and all they made arrives once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_worker.broker import queues, scripts
from llorch_worker.client import Client
from tests.faults.conftest import LEASE_S, SWEEP_S, StartWorker
from tests.faults.proxy import FaultProxy, contains
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, held_ids, wait_until

SEQUENCES = 4
RECOVERY_S = LEASE_S + SWEEP_S + 8.0
"""Also the time to reconnect in."""
ROOMY = {"lease_s": 4, "sweep_s": 1}
"""A lease that outlasts the fault: what must stay with its worker does."""


class Clock:
    """True from ``after_s`` on: for faults that are nothing but a time."""

    def __init__(self, after_s: float) -> None:
        self._at_s = time.monotonic() + after_s

    def __call__(self) -> bool:
        return time.monotonic() >= self._at_s


def threads(worker: WorkerProcess) -> int:
    """How many threads the process has."""
    return len(list(Path(f"/proc/{worker.process.pid}/task").iterdir()))


def assert_all_slots_serve(worker: WorkerProcess, witness: Witness, client: Client) -> None:
    """The worker runs as many jobs at once as ever, and then holds none."""
    with Latch(worker.log.with_suffix(".latch")) as latch:
        jobs = [witness.begun(witness.send(60, latch.prompt())) for _ in range(SEQUENCES)]
        assert held_ids(client.redis) == {job.id for job in jobs}
    witness.assert_whole(*jobs)
    wait_until(lambda: not held_ids(client.redis), what="the acknowledgements")


def reset(proxy: FaultProxy, _: Callable[[], object]) -> None:
    proxy.reset()


def isolate(proxy: FaultProxy, while_away: Callable[[], object]) -> None:
    proxy.isolate()
    while_away()
    proxy.heal()


def hold(proxy: FaultProxy, while_away: Callable[[], object]) -> None:
    proxy.hold()
    while_away()
    proxy.heal()


def blackhole(proxy: FaultProxy, while_away: Callable[[], object]) -> None:
    proxy.blackhole()
    while_away()
    proxy.heal()


def delay(proxy: FaultProxy, while_away: Callable[[], object]) -> None:
    proxy.delay(0.5)
    while_away()
    proxy.heal()


@pytest.mark.parametrize("fault", [reset, isolate, hold, blackhole, delay])
def test_jobs_run_on_through_a_broken_network_and_arrive_once(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    proxy: FaultProxy,
    make_latch: Callable[[str], Latch],
    fault: Callable[[FaultProxy, Callable[[], object]], None],
) -> None:
    soon, late = make_latch("soon"), make_latch("late")

    def while_away() -> None:
        soon.open()
        soon.wait_ended(2)
        # And a while longer, in which two results cannot be stored and two jobs run on.
        wait_until(Clock(0.7))

    worker = start_worker("w1", url=proxy.url, **ROOMY)
    ending = [witness.begun(witness.send(100, soon.prompt())) for _ in range(2)]
    lasting = [witness.begun(witness.send(500, late.prompt(after=499))) for _ in range(2)]
    fault(proxy, while_away)
    # A reset is over at once: there the two end after it.
    soon.open()
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


def test_after_an_outage_longer_than_a_lease_the_workers_that_lived_go_on(
    start_worker: StartWorker, witness: Witness, proxy: FaultProxy, latch: Latch
) -> None:
    first = start_worker("w1", url=proxy.url)
    # What is left of them takes longer than the outage: no step is shorter than 5 ms.
    jobs = [witness.begun(witness.send(900, latch.prompt())) for _ in range(SEQUENCES)]
    start_worker("w2", url=proxy.url)
    proxy.isolate()
    latch.open()
    wait_until(Clock(3 * LEASE_S))
    proxy.heal()
    assert not latch.ended(), "all of them run when Redis is back"
    witness.assert_whole(*jobs)
    assert first.process.poll() is None
    for job in jobs:
        assert witness.runs(job) == ["w1@test"]
        assert job.result(0).attempts == 1


def test_results_that_could_not_be_stored_for_long_arrive_and_no_thread_is_left(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy, latch: Latch
) -> None:
    worker = start_worker("w1", url=proxy.url)
    warm = [witness.send(20) for _ in range(SEQUENCES)]
    witness.assert_whole(*warm)
    before = threads(worker)
    jobs = [witness.begun(witness.send(100, latch.prompt())) for _ in range(SEQUENCES)]
    proxy.isolate()
    latch.open()
    latch.wait_ended(SEQUENCES)
    wait_until(Clock(4.5))
    proxy.heal()
    witness.assert_whole(*jobs)
    for job in jobs:
        assert job.result(0).attempts == 1
    assert_all_slots_serve(worker, witness, client)
    wait_until(lambda: threads(worker) <= before, what="the number of threads of before")


def test_a_result_whose_reply_is_lost_is_stored_once(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy, latch: Latch
) -> None:
    scripts.load(client.redis, "finish")
    worker = start_worker("w1", url=proxy.url, **ROOMY)
    job = witness.begun(witness.send(100, latch.prompt()))
    trap = proxy.lose_reply(contains("EVALSHA", scripts.digest("finish"), '"SUCCESS"'))
    latch.open()
    assert trap.wait(10)
    witness.assert_whole(job)
    assert job.result(0).attempts == 1
    assert_all_slots_serve(worker, witness, client)


@pytest.mark.parametrize("script", ["append", "finish"])
@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_write_that_is_lost_on_its_way_is_made_once(
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
    trap = set_trap(contains("EVALSHA", scripts.digest(script), job.id))
    latch.open()
    assert trap.wait(10)
    witness.assert_whole(job)
    assert job.result(0).attempts == 1
    assert_all_slots_serve(worker, witness, client)


def test_jobs_claimed_beside_one_whose_delivery_fails_are_not_kept_from_running(
    start_worker: StartWorker, witness: Witness, client: Client, proxy: FaultProxy
) -> None:
    # Redis knows the scripts, so the first claim of all takes everything at once.
    for script in ("claim", "bury"):
        scripts.load(client.redis, script)
    client.redis.lpush(queues.normal_queue("toy"), '{"headers": {"id": "no-envelope"}}')
    jobs = [witness.send(20) for _ in range(SEQUENCES - 1)]
    # One for each time that redis-py tries.
    traps = [proxy.lose_request(contains(scripts.digest("bury"))) for _ in range(20)]
    worker = start_worker("w1", url=proxy.url, ready=False)
    wait_until(lambda: "onnection to broker lost" in worker.text(), what="the delivery to fail")
    for trap in traps:
        proxy.disarm(trap)
    witness.assert_whole(*jobs, timeout_s=RECOVERY_S)
    assert_all_slots_serve(worker, witness, client)


def test_what_fails_again_and_again_while_redis_is_away_is_said_once(
    start_worker: StartWorker, witness: Witness, proxy: FaultProxy, latch: Latch
) -> None:
    worker = start_worker("w1", url=proxy.url)
    job = witness.begun(witness.send(200, latch.prompt()))
    proxy.isolate()
    latch.open()
    lost = ["cannot write to streams", "cannot listen for cancels", "cannot renew leases"]
    wait_until(lambda: all(sentence in worker.text() for sentence in lost))
    # Two reconnects and four renewals.
    wait_until(Clock(LEASE_S))
    proxy.heal()
    regained = ["writing to streams again", "listening for cancels again", "renewing leases again"]
    wait_until(lambda: all(sentence in worker.text() for sentence in regained))
    witness.assert_whole(job)
    assert {worker.text().count(sentence) for sentence in lost + regained} == {1}


def test_a_worker_told_to_stop_while_redis_is_away_ends_and_its_jobs_go_on_elsewhere(
    start_worker: StartWorker,
    witness: Witness,
    proxy: FaultProxy,
    latch: Latch,
) -> None:
    worker = start_worker("w1", url=proxy.url, drain_s=0.5)
    job = witness.begun(witness.send(200, latch.prompt(after=199)), 20)
    doomed = witness.begun(witness.send(4000))
    # So it waits for its tokens to be written when the cancel ends it.
    assert proxy.lose_reply(contains("EVALSHA", scripts.digest("append"), doomed.id)).wait(10)
    doomed.cancel()
    proxy.isolate()
    worker.process.terminate()
    worker.wait_exit(timeout_s=20)
    assert worker.text().count("shutting down, but Redis is unreachable: ") == 1
    latch.open()
    start_worker("w2")
    witness.assert_whole(job, timeout_s=RECOVERY_S)
    assert job.result(0).worker == "w2@test"
