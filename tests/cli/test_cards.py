"""Workers on cards, from the command line, on a machine whose cards are a file.

No card is here: torch and NVIDIA's library are told that there are some (``tests/fake_gpu``), and
the workers run the toy engine. Claims, names, environment, supervision and sentences are real.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from llorch_worker.broker.fleet import registry
from llorch_worker.client import Client
from tests.cli.command import Started, run
from tests.cli.test_bad_input import sentence
from tests.fake_gpu.machine import SITE, Machine, card
from tests.forks import MODULE_PATH
from tests.services import RedisServer

HOST = socket.gethostname()
GET_S = 60


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def url(own_server: RedisServer) -> str:
    """A Redis of its own: workers are named after cards, and all tests share one host."""
    return own_server.url


def variables(machine: Machine, **more: str) -> dict[str, str]:
    path = f"{SITE}{os.pathsep}{MODULE_PATH}"
    return machine.variables | {"PYTHONPATH": path} | more


def refused(*arguments: str, machine: Machine, **more: str) -> str:
    """The error sentence of a command."""
    ran = run(*arguments, **variables(machine, **more))
    assert ran.code != 0, ran
    return sentence(ran, ran.code)


def test_a_worker_is_named_after_its_card_and_is_the_only_one_on_it(
    machine: Machine, url: str
) -> None:
    arguments = ("worker", "--redis", url, "--model", "demo", "--device", "cuda:1")
    worker = Started(*arguments, **variables(machine, CUDA_VISIBLE_DEVICES="0,3"))
    try:
        worker.wait_for(f"gpu3@{HOST} ready.")
        with Client(url) as client:
            (found,) = client.workers()
            assert (found.hostname, found.device) == (f"gpu3@{HOST}", "gpu3")
            assert found.engine["device"] == "gpu3"
            job = client.submit(prompt="x", max_tokens=3)
            assert job.result(GET_S).worker == f"gpu3@{HOST}"
            assert registry.living(client.redis, "demo") == [f"llorch.demo@gpu3.{HOST}"]
        said = refused("worker", "--redis", url, "--device", "cuda:3", machine=machine)
        assert said.startswith("device cuda:3 already has a worker (gpu3 by gpu3 (process ")
        machine.show(card(0), card(1), card(2, model="NVIDIA GB10", free=None, total=None), card(3))
        doctor = run("doctor", "--redis", url, "--model", "demo", "--json", **variables(machine))
        cards = [c["finding"] for c in doctor.json["checks"] if c["subject"] == "device"]
        assert len([line for line in cards if "not in use" in line]) == 3
        assert any(f"(gpu3) NVIDIA H200, 140.0 GiB free of 141.0 GiB; in use by gpu3 (process "
                   f"{worker.pid} of {HOST})" in line for line in cards)  # fmt: skip
        assert any(
            "(gpu2) NVIDIA GB10, which shares the machine's memory; not in use" in line
            for line in cards
        )
        worker.signal(signal.SIGTERM)
        assert worker.ended() == 0
    finally:
        worker.child.kill()


def test_up_runs_a_worker_per_card_restarts_a_dead_one_and_drains_all(machine: Machine) -> None:
    machine.show(card(0), card(1, model="NVIDIA A10"), card(2))
    command = Started(
        *("up", "--no-flower", "--no-gateway", "--model", "demo", "--gpus", "0,1"),
        **variables(machine, TOY_STEP_MS="5"),
    )
    try:
        command.wait_for("Mixed cards (1 x NVIDIA H200, 1 x NVIDIA A10)")
        workers = command.wait_for("workers  ")
        assert f"gpu0@{HOST}, gpu1@{HOST}" in workers
        command.wait_for("Ctrl-C drains and ends")
        family = command.family()
        with Client(command.wait_for("Redis  ").split()[1]) as client:
            first = next(w for w in client.workers() if w.hostname == f"gpu0@{HOST}")
            os.kill(first.pid, signal.SIGKILL)
            command.wait_for("gpu0 ended (killed by SIGKILL); restarting now")
            command.wait_for(f"gpu0@{HOST} ready.", count=2)
            family |= command.family()
            jobs, begun_by = [], set()
            # Each wakes the worker that has waited longest.
            while len(begun_by) < 2:
                jobs.append(client.submit(prompt="x", max_tokens=200))
                begun_by.add(next(jobs[-1].stream()).event.worker)
            command.signal(signal.SIGTERM)
            command.wait_for("Draining")
            workers_of = {job.result(GET_S).worker for job in jobs}
            assert workers_of == {f"gpu0@{HOST}", f"gpu1@{HOST}"}
            assert command.ended() == 0
        assert not {pid for pid in family if psutil.pid_exists(pid)}
    finally:
        command.child.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "0,9"), "device cuda:9 does not exist; the last card here is cuda:3"),
        (("--gpus", "none"), "--gpus must be all or card numbers such as 0,2 (got 'none')"),
        (("--gpus", "1,1"), "cuda:1 is listed twice: a card takes one worker"),
        (("--gpus", "all", "--workers", "5"), "--workers 5 disagrees with 4 devices"),
        (("--gpus", "0", "--devices", "cpu"), "--gpus and --devices both place workers"),
    ],
)  # fmt: skip
def test_up_refuses_wrong_cards(machine: Machine, options: tuple[str, ...], said: str) -> None:
    assert said in refused("up", "--no-flower", "--model", "demo", *options, machine=machine)


@pytest.mark.parametrize("command", [("worker", "--device", "cuda"), ("up", "--gpus", "all")])
def test_without_a_driver_no_command_falls_back_to_the_cpu(
    machine: Machine, redis_url: str, command: tuple[str, ...]
) -> None:
    machine.lose_driver()
    said = refused(*command, "--redis", redis_url, "--model", "demo", machine=machine)
    assert said.startswith("no NVIDIA driver responds (Driver Not Loaded); check `nvidia-smi`")


@pytest.mark.parametrize(("options", "device"), [(("--gpus", "all"), "auto"), ((), "cuda")])
def test_up_names_the_faults_of_cards_none_of_which_responds(
    machine: Machine, options: tuple[str, ...], device: str
) -> None:
    machine.show(card(0, fault="GPU is lost"), card(1, fault="Unknown Error"))
    arguments = ("up", "--no-flower", "--model", "demo", *options)
    said = refused(*arguments, machine=machine, LLORCH_DEVICE=device)
    assert said == ("no card responds (gpu0: GPU is lost, gpu1: Unknown Error); see llorch doctor")


def test_inspect_refuses_a_full_card_with_needed_and_free_memory(
    machine: Machine, redis_url: str, demo_model: Path
) -> None:
    machine.show(card(0, free=20 * 2**20))
    ran = run("inspect", demo_model, "--device", "cuda:0", **variables(machine))
    assert ran.code == 1, ran
    assert "workspace" in ran.out
    assert "20.0 MiB free" in ran.out
