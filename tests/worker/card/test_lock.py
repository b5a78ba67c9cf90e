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
from llorch_worker.worker.card.lock import CardLocks, Holder
from tests.fake_gpu.machine import SITE, Machine, uuid
from tests.services import REPOSITORY, STOP_TIMEOUT_S, tethered

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


class Taker:
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

    def take(self) -> str:
        self.start()
        return self.said()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def taker(machine: Machine) -> Iterator[Callable[..., Taker]]:
    started: list[Taker] = []

    def start(device: str = "cuda") -> Taker:
        started.append(Taker(machine, device))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_eight_processes_racing_for_four_cards_get_one_each_or_an_error(
    taker: Callable[..., Taker],
) -> None:
    racers = [taker() for _ in range(8)]
    for racer in racers:
        racer.start()
    said = Counter(racer.said() for racer in racers)
    assert {name for name in said if name.startswith("gpu")} == {"gpu0", "gpu1", "gpu2", "gpu3"}
    refused = [sentence for sentence in said.elements() if not sentence.startswith("gpu")]
    assert len(refused) == 4
    for sentence in refused:
        assert sentence.startswith("each of the 4 cards already has a worker (gpu0 by gpu0 (")
        assert "start fewer workers, add cards, or use device cpu" in sentence


def test_a_card_is_free_again_however_its_holder_ended(taker: Callable[..., Taker]) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
        holder = taker("cuda:1")
        assert holder.take() == "gpu1"
        waiting = taker("cuda:1")
        assert waiting.take().startswith("device cuda:1 already has a worker (gpu1 by gpu1 (")
        assert waiting.process.wait(STOP_TIMEOUT_S) == 1
        holder.process.send_signal(number)
        holder.process.wait(STOP_TIMEOUT_S)
        again = taker("cuda:1")
        assert again.take() == "gpu1"
        again.process.kill()
        again.process.wait(STOP_TIMEOUT_S)


def test_cuda_takes_the_first_card_that_is_free(taker: Callable[..., Taker]) -> None:
    assert taker("cuda:0").take() == "gpu0"
    assert taker("cuda:2").take() == "gpu2"
    assert taker().take() == "gpu1"
    assert taker().take() == "gpu3"


def test_looking_at_a_lock_shows_the_holder_and_takes_nothing(
    taker: Callable[..., Taker], machine: Machine
) -> None:
    locks = CardLocks(machine.locks)
    free, held = (Card(number, uuid(number), "NVIDIA H200", 1, 2) for number in (0, 1))
    assert locks.holder(free) is None
    assert not machine.locks.exists(), "a look leaves nothing behind"
    owner = taker("cuda:1")
    assert owner.take() == "gpu1"
    holder = locks.holder(held)
    assert holder is not None
    assert (holder.worker, holder.pid) == ("gpu1", owner.process.pid)
    assert locks.holder(free) is None
    owner.process.kill()
    owner.process.wait(STOP_TIMEOUT_S)
    assert locks.holder(held) is None


def test_an_unusable_folder_is_reported(machine: Machine, taker: Callable[..., Taker]) -> None:
    machine.locks.write_text("a file in its place")
    said = taker().take()
    assert "the folder of device locks" in said
    assert "LLORCH_DEVICE_LOCKS" in said


def test_a_card_is_taken_until_the_last_process_with_its_lock_has_ended(machine: Machine) -> None:
    """An engine keeps its worker's lock: the card's memory is free only when both are gone."""
    locks = CardLocks(machine.locks)
    card = Card(0, uuid(0), "NVIDIA H200", 1, 2)
    lock = locks.take(card, Holder(worker="w", host="h", pid=1))
    assert lock is not None
    engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[lock])
    os.close(lock)
    assert locks.take(card, Holder(worker="other", host="h", pid=2)) is None
    engine.kill()
    engine.communicate()
    again = locks.take(card, Holder(worker="other", host="h", pid=2))
    assert again is not None
    os.close(again)
