"""The units of deploy/systemd: systemd accepts them, and they fit what a worker does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llorch_worker.settings import Settings

UNITS = Path(__file__).resolve().parents[1] / "deploy" / "systemd"
WORKER = UNITS / "llorch-worker@.service"
PROGRAM = "/opt/llorch/bin/llorch"


def service(unit: Path) -> dict[str, list[str]]:
    """The values of each key; a key may come more than once."""
    found: dict[str, list[str]] = {}
    section = unit.read_text().partition("[Service]")[2].partition("\n[")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def environment(found: dict[str, list[str]]) -> dict[str, str]:
    return dict(pair.split("=", 1) for line in found["Environment"] for pair in line.split())


def seconds(text: str) -> float:
    minutes = text.removesuffix("min")
    return float(text) if minutes == text else 60 * float(minutes)


@pytest.fixture(scope="module")
def worker() -> dict[str, list[str]]:
    return service(WORKER)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS.iterdir():
        text = unit.read_text().replace(PROGRAM, "/bin/true")
        # Users of a machine where the service is installed.
        text = re.sub(r"^(User|Group)=.*\n", "", text, flags=re.MULTILINE)
        (tmp_path / unit.name.replace("@", "@gpu0")).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("instance", "device"), [("gpu0", "cuda:0"), ("gpu12", "cuda:12"), ("cpu", "cpu")]
)
def test_an_instance_names_its_device(
    worker: dict[str, list[str]], instance: str, device: str
) -> None:
    (start,) = worker["ExecStart"]
    shell, flags, rest = start.split(" ", 2)
    script, _, argument = rest.rpartition(" ")
    assert argument == "%i"
    # As systemd reads it: the quotes are its own, and $$ is a dollar sign.
    script = script.strip("'").replace("$$", "$").replace(PROGRAM, "echo")
    done = subprocess.run(
        [shell, flags, script, instance], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"worker --device {device}\n"


def test_a_reload_loads_new_weights_and_restarts_no_worker(worker: dict[str, list[str]]) -> None:
    assert worker["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_a_worker_has_the_time_to_load_to_drain_and_to_end_itself(
    worker: dict[str, list[str]],
) -> None:
    (stop,), (watchdog,), (start,) = (
        worker[key] for key in ("TimeoutStopSec", "WatchdogSec", "TimeoutStartSec")
    )
    assert seconds(stop) >= float(environment(worker)["LLORCH_DRAIN_S"]) + 30
    assert seconds(watchdog) > Settings.model_fields["watchdog_s"].default
    assert seconds(start) >= 1800
    assert worker["Type"] == ["notify"]
    # A core dump would hold the model, and prompts.
    assert worker["WatchdogSignal"] == ["SIGKILL"]
