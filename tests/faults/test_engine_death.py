"""An engine that dies: its keeper says why, hands its jobs to others, and starts another."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from llorch_worker.broker.jobs.ended_jobs import ended_jobs
from llorch_worker.client import Client
from llorch_worker.contract import AttemptsExhausted
from tests.faults.conftest import QUICK, StartWorker
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.memory_groups import memory_group
from tests.services import WorkerProcess, wait_until
from tests.store import held_ids

GET_S = 60
LONG_LEASE_S = 600
"""A test that ends before does not wait for one to lapse."""
LOADED = re.compile(r"serves again after ([\d.]+) s, of which it loaded for ([\d.]+) s")
KEPT = {"lease_s": LONG_LEASE_S}


def serves_again(worker: WorkerProcess, times: int = 1) -> bool:
    return worker.text().count("the engine serves again") >= times


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_jobs_of_a_killed_engine_go_on_in_another_worker(
    start_worker: StartWorker, witness: Witness, latch: Latch, tmp_path: Path, name: str
) -> None:
    slow = tmp_path / "slow"
    first = start_worker("w1", TOY_LOADS_SLOWLY_FROM=slow, **KEPT)
    jobs = [witness.begun(witness.send(300, latch.prompt(after=299)), 20) for _ in range(3)]
    start_worker("w2", **KEPT, **QUICK)
    slow.touch()
    os.kill(first.engine_pid(), signal.Signals[name])
    latch.open()
    witness.assert_whole(*jobs)
    for job in jobs:
        assert witness.runs(job) == ["w1@test", "w2@test"]
        assert job.result(0).attempts == 2
    assert f"the engine died: signal {name}; jobs that go on: 3, of these susp" in first.text()
    assert first.process.poll() is None
    card = first.card()
    assert card is not None
    assert (card.engine["deaths"], card.last_death) == (1, f"signal {name}")
    assert card.away is not None
    assert card.away.startswith(f"the engine died: signal {name}; it starts again now")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("break once", "RuntimeError in the engine's thread"),
        ("hang", "it finished no step for"),
    ],
)
def test_one_worker_goes_on_with_its_jobs_once_its_next_engine_serves(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    latch: Latch,
    prompt: str,
    reason: str,
) -> None:
    worker = start_worker("w1", watchdog_s=1, **KEPT)
    neighbours = [witness.begun(witness.send(200, latch.prompt(after=199)), 10) for _ in range(2)]
    job = witness.send(20, prompt=prompt)
    wait_until(lambda: serves_again(worker))
    latch.open()
    witness.assert_whole(job, *neighbours)
    assert reason in worker.text()
    # All but its load is the worker's own: a moment where nothing else runs, and no pause.
    again_s, load_s = map(float, LOADED.search(worker.text()).groups())
    assert again_s >= load_s
    card = worker.card()
    assert card is not None
    assert (card.away, card.engine_pid) == (None, worker.engine_pid())
    assert reason in (card.last_death or "")
    for one in (job, *neighbours):
        assert witness.runs(one)[-1] == "w1@test"
        assert one.result(0).attempts == 2
    # Nobody saw their first token as late as the last attempt began.
    ended = wait_until(lambda: len(found := ended_jobs(client.redis, 9)) == 3 and found)
    assert {one.id: one.resumed for one in ended} == {
        job.id: False,
        **dict.fromkeys((each.id for each in neighbours), True),
    }
    assert worker.process.poll() is None


@pytest.mark.parametrize("failure", ["die", "the model is gone"])
def test_a_worker_whose_engine_does_not_start_again_stays_up_and_says_so(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    tmp_path: Path,
    latch: Latch,
    failure: str,
) -> None:
    file = tmp_path / "failure"
    worker = start_worker("w1", TOY_FAILS_FROM=file, **KEPT)
    job = witness.begun(witness.send(30, latch.prompt(after=10)), 5)
    file.write_text(failure)
    os.kill(worker.engine_pid(), signal.SIGSEGV)
    reason = "exit code 9" if failure == "die" else failure
    wait_until(lambda: worker.text().count(f"the engine does not start: {reason}") >= 2)
    wait_until(lambda: not held_ids(client.redis))
    card = wait_until(worker.card)
    assert "does not start" in (card.away or "")
    assert worker.process.poll() is None
    file.unlink()
    latch.open()
    witness.assert_whole(job)
    assert witness.runs(job) == ["w1@test", "w1@test"]


def test_an_engine_that_breaks_while_idle_costs_no_job(
    start_worker: StartWorker, witness: Witness
) -> None:
    worker = start_worker("w1", **KEPT)
    jobs = [witness.send(1, prompt="break after")]
    wait_until(lambda: jobs.append(witness.send(1)) or serves_again(worker))
    witness.assert_whole(*jobs)


def test_a_worker_without_an_engine_stops_at_once(
    start_worker: StartWorker, witness: Witness, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "failure"
    worker = start_worker("w1", TOY_FAILS_FROM=file, **KEPT)
    file.write_text("the model is gone")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    wait_until(lambda: "does not start" in worker.text())
    job = witness.send(5)
    worker.process.terminate()
    assert worker.wait_exit() == 0
    start_worker("w2", **QUICK)
    witness.assert_whole(job)


@pytest.mark.parametrize("failure", ["stop", "check and stop"])
def test_a_worker_whose_engine_hangs_before_it_serves_stops_at_once(
    start_worker: StartWorker, tmp_path: Path, failure: str
) -> None:
    file = tmp_path / "failure"
    file.write_text(failure)
    worker = start_worker("w1", ready=False, TOY_FAILS_FROM=file)
    hangs = psutil.STATUS_STOPPED
    wait_until(
        lambda: hangs in [each.status() for each in psutil.Process(worker.process.pid).children()]
    )
    worker.process.terminate()
    assert worker.wait_exit() == 0


def test_an_engine_that_dies_while_its_worker_drains_is_not_replaced(
    start_worker: StartWorker, witness: Witness, latch: Latch
) -> None:
    worker = start_worker("w1", drain_s=LONG_LEASE_S, **KEPT)
    job = witness.begun(witness.send(30, latch.prompt(after=10)), 5)
    worker.process.terminate()
    wait_until(lambda: "Warm shutdown" in worker.text())
    os.kill(worker.engine_pid(), signal.SIGABRT)
    assert worker.wait_exit() == 0
    assert not serves_again(worker)
    latch.open()
    start_worker("w2", **QUICK)
    witness.assert_whole(job)


@pytest.fixture
def small_group() -> Iterator[Path]:
    with memory_group(500 * 2**20) as folder:
        yield folder


@contextmanager
def starting_in(group: Path) -> Iterator[None]:
    """What this process starts meanwhile is of this control group."""
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line.split(":")[2] for line in groups if ":memory:" in line)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (group.parent / own.strip("/") / "cgroup.procs").write_text(str(os.getpid()))


def test_a_job_that_takes_all_memory_costs_engines_and_no_worker(
    start_worker: StartWorker, witness: Witness, client: Client, small_group: Path
) -> None:
    # From its start: another group may count other kills. Fresh: a fork would be of another group.
    with starting_in(small_group):
        worker = start_worker("w1", max_attempts=2, fresh=True, **KEPT)
    poison = client.submit(prompt="eat", max_tokens=5)
    with pytest.raises(AttemptsExhausted):
        poison.result(GET_S)
    assert worker.text().count("the engine died: the kernel killed it") == 2
    witness.assert_whole(witness.send(20))
    assert worker.process.poll() is None
