"""One worker a card, between real processes, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llorch_worker.devices import Card
from llorch_worker.worker.card.lock import CardLocks
from tests.fake_gpu.machine import SITE, Machine, uuid
from tests.services import REPOSITORY, tethered

HOLD = """
import os, sys
from pathlib import Path
from llorch_worker.worker.card.assignment import assign_device
from llorch_worker.contract import LlorchError
sys.stdin.readline()  # the start, for a race
try:
    place = assign_device(sys.argv[1], Path(os.environ["LLORCH_DEVICE_LOCKS"]))
except LlorchError as error:
    print(error.message, flush=True)
    sys.exit(1)
print(place.name, flush=True)
sys.stdin.readline()  # until it may end
"""


class Claimer:
    """A process that takes a card when told to and keeps it until told or killed."""

    def __init__(self, machine: Machine, device: str) -> None:
        path = os.pathsep.join(map(str, (SITE, REPOSITORY)))
        self.process = subprocess.Popen(
            tethered(sys.executable, "-c", HOLD, device),
            env=os.environ | machine.variables | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def claim(self) -> str:
        self.start()
        return self.said()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def claimer(machine: Machine) -> Iterator[Callable[..., Claimer]]:
    started: list[Claimer] = []

    def start(device: str = "cuda") -> Claimer:
        started.append(Claimer(machine, device))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_eight_that_race_for_four_cards_get_one_each_or_a_sentence(
    claimer: Callable[..., Claimer],
) -> None:
    racers = [claimer() for _ in range(8)]
    for racer in racers:
        racer.start()
    said = Counter(racer.said() for racer in racers)
    assert {name for name in said if name.startswith("gpu")} == {"gpu0", "gpu1", "gpu2", "gpu3"}
    refused = [sentence for sentence in said.elements() if not sentence.startswith("gpu")]
    assert len(refused) == 4
    for sentence in refused:
        assert sentence.startswith("each of the 4 cards already has a worker (gpu0 by gpu0 (")
        assert "start fewer workers, add cards, or use device cpu" in sentence


def test_a_card_is_free_again_however_its_holder_ended(claimer: Callable[..., Claimer]) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
        holder = claimer("cuda:1")
        assert holder.claim() == "gpu1"
        waiting = claimer("cuda:1")
        assert waiting.claim().startswith("device cuda:1 already has a worker (gpu1 by gpu1 (")
        assert waiting.process.wait(10) == 1
        holder.process.send_signal(number)
        holder.process.wait(10)
        again = claimer("cuda:1")
        assert again.claim() == "gpu1"
        again.process.kill()
        again.process.wait(10)


def test_cuda_takes_the_first_card_that_is_free(claimer: Callable[..., Claimer]) -> None:
    assert claimer("cuda:0").claim() == "gpu0"
    assert claimer("cuda:2").claim() == "gpu2"
    assert claimer().claim() == "gpu1"
    assert claimer().claim() == "gpu3"


def test_who_looks_sees_the_holder_and_takes_nothing(
    claimer: Callable[..., Claimer], machine: Machine
) -> None:
    locks = CardLocks(machine.locks)
    free, held = (Card(number, uuid(number), "NVIDIA H200", 1, 2) for number in (0, 1))
    assert locks.holder(free) is None
    assert not machine.locks.exists(), "a look leaves nothing behind"
    owner = claimer("cuda:1")
    assert owner.claim() == "gpu1"
    holder = locks.holder(held)
    assert holder is not None
    assert (holder.worker, holder.pid) == ("gpu1", owner.process.pid)
    assert locks.holder(free) is None
    owner.process.kill()
    owner.process.wait(10)
    assert locks.holder(held) is None


def test_a_folder_that_cannot_be_used_is_said(
    machine: Machine, claimer: Callable[..., Claimer]
) -> None:
    machine.locks.write_text("a file in its place")
    said = claimer().claim()
    assert "the folder of device locks" in said
    assert "LLORCH_DEVICE_LOCKS" in said
