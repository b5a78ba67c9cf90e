"""A process that does nothing is told from one that works, or waits for a processor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from llorch_worker.processes import standstill
from llorch_worker.processes.standstill import LOOK_S, Standstill
from tests.waiting import wait_until

IDLE_S, SILENT_S = 30.0, 120.0
STEP_S = 4 * LOOK_S
COMPUTES = "while True: pass"
ITS_CHILD_COMPUTES = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])"
RESTS = "import time; print(flush=True); time.sleep(600)"


class Clock:
    """Goes on only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def looks(watched: Standstill, clock: Clock, for_s: float) -> str | None:
    """The last that looks say in which so much time passes."""
    end_s = clock.now_s + for_s
    said = watched.reason()
    while clock.now_s < end_s and said is None:
        clock.now_s += STEP_S
        said = watched.reason()
    return said


def resting(start: Callable[[str], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    process = start(RESTS)
    assert process.stdout is not None
    process.stdout.readline()
    # On a busy machine it waits for a processor before it rests.
    wait_until(lambda: [state for state, _ in standstill._found(process.pid)] == ["S"])
    return process


def test_one_that_rests_is_given_up(
    start: Callable[[str], subprocess.Popen[bytes]], clock: Clock
) -> None:
    watched = Standstill(resting(start).pid, idle_s=IDLE_S, silent_s=SILENT_S)
    said = looks(watched, clock, SILENT_S / 2)
    assert said is not None
    assert said.startswith("it did nothing for ")


@pytest.mark.parametrize("code", [COMPUTES, ITS_CHILD_COMPUTES])
def test_one_that_computes_is_given_up_only_if_it_tells_nothing(
    start: Callable[[str], subprocess.Popen[bytes]], clock: Clock, code: str
) -> None:
    process = start(code)
    watched = Standstill(process.pid, idle_s=IDLE_S, silent_s=SILENT_S)
    wait_until(lambda: _computes(process.pid))
    assert looks(watched, clock, SILENT_S / 2) is None
    watched.heard()
    assert looks(watched, clock, SILENT_S / 2) is None
    assert looks(watched, clock, SILENT_S) == f"it told nothing for {SILENT_S:.0f} s"


def _computes(session: int) -> bool:
    """Whether a process of the session has nothing else to wait for than a processor."""
    found = [*standstill._found(session)]
    return any(state == "R" and work_s > 0.1 for state, work_s in found)


def test_a_process_whose_name_is_no_text_is_seen(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    named = r"open('/proc/self/comm', 'wb').write(b'\xff')"
    process = start(f"{named}; {RESTS}")
    assert process.stdout is not None
    process.stdout.readline()
    assert Path(f"/proc/{process.pid}/comm").read_bytes() == b"\xff\n"
    assert len([*standstill._found(process.pid)]) == 1


def test_time_in_which_nobody_looked_does_not_count(
    start: Callable[[str], subprocess.Popen[bytes]], clock: Clock
) -> None:
    """The laptop slept, or the container was frozen."""
    watched = Standstill(resting(start).pid, idle_s=IDLE_S, silent_s=SILENT_S)
    assert looks(watched, clock, IDLE_S / 2) is None
    clock.now_s += 2 * SILENT_S
    assert looks(watched, clock, IDLE_S / 2) is None


def test_where_the_system_tells_nothing_only_silence_counts(clock: Clock) -> None:
    watched = Standstill(2**22 + 1, idle_s=IDLE_S, silent_s=SILENT_S)
    assert looks(watched, clock, SILENT_S - 2 * STEP_S) is None
    assert looks(watched, clock, SILENT_S) == f"it told nothing for {SILENT_S:.0f} s"
