"""Which card a process takes, and what it says if it gets none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_worker.worker.card.assignment import SPIN_COUNT, SPINS, WAIT_POLICY, limit_spinning
from tests.fake_gpu.machine import SITE, Machine, card, uuid
from tests.services import REPOSITORY

SHOW = """
import os, sys
from pathlib import Path
from llorch_worker.worker.card.assignment import assign_device
from llorch_worker.contract import LlorchError
try:
    place = assign_device(sys.argv[1], Path(os.environ["LLORCH_DEVICE_LOCKS"]))
except LlorchError as error:
    sys.exit(error.message)
assert "torch" not in sys.modules
print(place.name, place.device, os.environ.get("CUDA_VISIBLE_DEVICES"),
      os.environ.get("CUDA_DEVICE_ORDER"))
"""


@pytest.fixture
def take(tmp_path: Path) -> Callable[..., str]:
    """What a process that takes a place says: of it, or why it has none."""

    def run(
        device: str, machine: Machine | None, *more_path: Path, visible: str | None = None
    ) -> str:
        # An engine that another test loaded in this process has set the order.
        env = {name: text for name, text in os.environ.items() if not name.startswith("CUDA_")}
        env |= machine.variables if machine else {"LLORCH_DEVICE_LOCKS": str(tmp_path)}
        paths = [*more_path, SITE, REPOSITORY]
        env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        done = subprocess.run(
            [sys.executable, "-c", SHOW, device],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return (done.stdout if done.returncode == 0 else done.stderr).strip()

    return run


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_process_sees_only_the_card_it_asked_for(
    take: Callable[..., str], machine: Machine
) -> None:
    assert take("cuda:3", machine) == f"gpu3 cuda:0 {uuid(3)} PCI_BUS_ID"
    # The second of those that are visible, by nvidia-smi's number.
    assert take("cuda:1", machine, visible="3,2") == f"gpu2 cuda:0 {uuid(2)} PCI_BUS_ID"
    assert take("cuda", machine, visible="2,1") == f"gpu2 cuda:0 {uuid(2)} PCI_BUS_ID"
    assert take("cpu", machine) == "cpu cpu None None"


def test_a_card_without_a_uuid_is_named_by_its_number(
    take: Callable[..., str], machine: Machine
) -> None:
    machine.show(card(0), card(1, uuid=None))
    assert take("cuda:1", machine) == "gpu1 cuda:0 1 PCI_BUS_ID"


def test_a_missing_card_is_reported_in_one_sentence(
    take: Callable[..., str], machine: Machine
) -> None:
    said = take("cuda", None)
    assert said.startswith("no NVIDIA driver responds (Driver Not Loaded); check `nvidia-smi`")
    assert "the last card here is cuda:3" in take("cuda:4", machine)
    assert "the last card here is cuda:1" in take("cuda:2", machine, visible="0,3")
    assert "CUDA_VISIBLE_DEVICES is ''" in take("cuda", machine, visible="")
    machine.show(card(0), card(1, fault="GPU is lost"))
    assert "gpu1 does not answer (GPU is lost)" in take("cuda:1", machine)
    machine.show(card(0, fault="GPU is lost"))
    assert "no card works: gpu0 does not answer" in take("cuda", machine)
    machine.show()
    assert "this machine has none" in take("cuda", machine)


def test_cuda_skips_a_card_that_does_not_answer(take: Callable[..., str], machine: Machine) -> None:
    machine.show(card(0, fault="GPU is lost"), card(1))
    assert take("cuda", machine).startswith("gpu1 ")


def test_a_card_that_shares_the_machines_memory_is_a_card(
    take: Callable[..., str], machine: Machine
) -> None:
    """Its driver knows no memory of the card: NVML says "Not Supported"."""
    machine.show(card(0, model="NVIDIA GB10", free=None, total=None))
    assert take("cuda", machine).startswith("gpu0 ")


def test_auto_is_a_card_if_torch_can_use_one(
    take: Callable[..., str], machine: Machine, tmp_path: Path
) -> None:
    for name, cuda in (("cpu_build", "None"), ("cuda_build", "'13.0'")):
        package = tmp_path / name / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('loaded too early')")
        (package / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    assert take("auto", machine, tmp_path / "cpu_build") == "cpu cpu None None"
    assert take("auto", machine, tmp_path / "cuda_build").startswith("gpu0 cuda:0 ")
    assert take("auto", None, tmp_path / "cuda_build") == "cpu cpu None None"
    machine.show(card(0, fault="GPU is lost"))
    assert "no card works" in take("auto", machine, tmp_path / "cuda_build")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {SPINS: SPIN_COUNT}),
        ({SPINS: "7"}, {SPINS: "7"}),
        ({WAIT_POLICY: "active"}, {WAIT_POLICY: "active"}),
    ],
)
def test_idle_threads_sleep_soon_unless_the_operator_sets_how_they_wait(
    before: dict[str, str], after: dict[str, str]
) -> None:
    environment = dict(before)
    limit_spinning(environment)
    assert environment == after
