"""A device that fails: the worker exits and says why, and its jobs go on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llorch_worker.client import Client
from tests.fake_gpu.machine import SITE, Machine, card
from tests.faults.conftest import QUICK, StartWorker
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import REAL_APP, REPOSITORY, RedisServer, wait_until
from tests.store import held_ids

GET_S = 60


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, count=2)


@pytest.fixture
def on_a_card(machine: Machine) -> dict[str, Any]:
    """Options of a worker that takes a card and checks it every 0.2 s."""
    path = f"{SITE}:{REPOSITORY}"
    variables = machine.variables
    return {
        "device": "cuda", "residency_check_s": 0.2, "PYTHONPATH": path,
        "FAKE_CARDS": variables["FAKE_CARDS"], "device_locks": variables["LLORCH_DEVICE_LOCKS"],
    }  # fmt: skip


@pytest.mark.parametrize("loss", ["card", "driver"])
def test_a_worker_whose_card_fails_exits_and_its_jobs_resume_elsewhere(
    start_worker: StartWorker,
    witness: Witness,
    client: Client,
    machine: Machine,
    on_a_card: dict[str, Any],
    latch: Latch,
    loss: str,
) -> None:
    worker = start_worker("gpu0", **on_a_card)
    jobs = [witness.begun(witness.send(300, latch.prompt(after=299)), 10) for _ in range(3)]
    if loss == "card":
        machine.show(card(0, fault="GPU is lost"), card(1))
        sentence = (
            "gpu0 does not answer (GPU is lost); the worker ends and its jobs resume elsewhere"
        )
    else:
        machine.lose_driver()
        sentence = "no NVIDIA driver responds (Driver Not Loaded)"
    assert worker.wait_exit() == 1
    assert sentence in worker.text()
    assert not held_ids(client.redis), "the worker releases its leases"
    latch.open()
    start_worker("w2", **QUICK)
    witness.assert_whole(*jobs)
    for job in jobs:
        assert (job.result(0).worker, job.result(0).attempts) == ("w2@test", 1)


def test_a_worker_whose_tensors_leave_the_device_exits(
    start_worker: StartWorker, witness: Witness, client: Client, latch: Latch, tmp_path: Path
) -> None:
    flag = tmp_path / "misplaced"
    worker = start_worker("w1", residency_check_s=0.2, TOY_MISPLACED=flag)
    job = witness.begun(witness.send(300, latch.prompt(after=299)), 10)
    flag.touch()
    assert worker.wait_exit() == 1
    assert "not all of model and cache is on toy: blocks.0.weight on cpu" in worker.text()
    assert not held_ids(client.redis)
    latch.open()
    start_worker("w2", **QUICK)
    witness.assert_whole(job)


def test_a_worker_whose_tensors_are_misplaced_does_not_start(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "misplaced").touch()
    worker = start_worker("w1", ready=False, TOY_MISPLACED=tmp_path / "misplaced")
    assert worker.wait_exit() == 1
    assert "cannot start: not all of model and cache is on toy" in worker.text()


def test_a_job_whose_device_fails_gives_the_same_text_with_another_engine(
    own_server: RedisServer, start_worker: StartWorker, demo_model: Path
) -> None:
    # Without drafts, whose warm-up takes as many steps as there is time.
    options = {"model": demo_model, "model_name": "demo", "max_sequences": 4, "drafter": "off"}
    ask = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 60}
    with Client(own_server.url, model="demo") as client:
        lost = start_worker(
            "w1", app="tests.faults.lost_device_app", LOST_AFTER_STEPS=40, **options
        )
        with lost.paused():
            jobs = [client.submit(**ask) for _ in range(3)]
        wait_until(lambda: "the engine died: CUDA error: unspecified launch failure" in lost.text())
        start_worker("w2", app=REAL_APP, **options)
        results = [job.result(GET_S) for job in jobs]
        whole = client.submit(**ask).result(GET_S)
        assert {result.text for result in results} == {whole.text}
        assert min(result.attempts for result in results) == 2
        wait_until(lambda: not held_ids(client.redis))
        assert lost.process.poll() is None
