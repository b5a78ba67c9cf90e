"""A child is heard, ends with its reason, and cannot leave its keeper waiting."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llorch_worker.processes.child import Child, End
from llorch_worker.processes.oom import MORE_LIKELY
from tests.waiting import wait_until

MODULE = "tests.processes.told_child"


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(idle_s: float = 600, silent_s: float = 600) -> Child:
        children.append(Child(MODULE, name="child", idle_s=idle_s, silent_s=silent_s))
        return children[-1]

    yield start
    for child in children:
        child.discard()
        assert not psutil.pid_exists(child.pid)


def said_by(child: Child, *told: bytes) -> End:
    """How it ends that was told this."""
    for each in told:
        child.send(each)
    return child.read(lambda _: None)


@pytest.mark.parametrize(
    ("told", "label", "reason"),
    [
        (b"exit 3", "exit", "exit code 3"),
        (b"signal SIGSEGV", "segfault", "signal SIGSEGV"),
        (b"signal SIGBUS", "segfault", "signal SIGBUS"),
        (b"signal SIGABRT", "abort", "signal SIGABRT"),
        (b"signal SIGKILL", "killed", "signal SIGKILL"),
        (b"signal 40", "killed", "signal SIGRTMIN+6"),
        (b"half a frame", "segfault", "signal SIGSEGV"),
        (b"noise", "protocol", "no message came from it: a frame of"),
    ],
)
def test_its_end_is_explained(
    start: Callable[..., Child], told: bytes, label: str, reason: str
) -> None:
    end = said_by(start(), told)
    assert end.label == label
    assert end.reason.startswith(reason)


def test_what_comes_before_its_end_is_heard(start: Callable[..., Child]) -> None:
    child, heard = start(), list[bytes]()
    for each in (b"one", b"two", b"signal SIGKILL"):
        child.send(each)
    assert child.read(heard.append).label == "killed"
    assert heard == [b"one", b"two"]


def test_a_message_that_cannot_be_taken_ends_it(
    start: Callable[..., Child], caplog: pytest.LogCaptureFixture
) -> None:
    def take(_: bytes) -> None:
        raise LookupError

    child = start()
    child.send(b"text")
    assert child.read(take) == End("protocol", "LookupError at a message from it", -signal.SIGKILL)
    assert "cannot be taken" in caplog.text


def test_one_that_stands_still_is_ended_by_those_that_wait_for_it(
    start: Callable[..., Child],
) -> None:
    child = start(idle_s=0.3)
    os.kill(child.pid, signal.SIGSTOP)

    def waits_and_looks() -> bool:
        child.look()
        return child._said is not None

    wait_until(waits_and_looks)
    end = child.read(lambda _: None)
    assert end.label == "stalled"
    assert end.reason.startswith("it did nothing for ")


def test_one_that_closes_its_connection_and_goes_on_is_ended(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llorch_worker.processes.child.EXIT_S", 0.1)
    end = said_by(start(), b"hang up")
    assert (end.label, end.reason) == ("exit", "it closed its connection and went on")


def test_it_is_the_first_to_be_ended_where_memory_is_short(start: Callable[..., Child]) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    score = int(Path(f"/proc/{start().pid}/oom_score_adj").read_text())
    assert score == min(1000, own + MORE_LIKELY)


def test_nobody_reads_once_it_has_ended_or_told_nothing_in_time(
    start: Callable[..., Child],
) -> None:
    child = start()
    with pytest.raises(TimeoutError):
        child.receive(0.0)
    assert child.reads_since_s is None
    said_by(child, b"half a frame")
    assert child.reads_since_s is None


@pytest.mark.parametrize("fails", ["Outbox", "Standstill", "let_die_first", "oom_kills"])
def test_nothing_of_one_is_left_that_cannot_be_watched(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    started: list[int] = []

    def refuse(*_: Any, **__: Any) -> None:
        started.extend(each.pid for each in psutil.Process().children())
        raise RuntimeError("can't start new thread")

    before, files = {each.pid for each in psutil.Process().children()}, _files()
    with monkeypatch.context() as patched:
        patched.setattr(f"llorch_worker.processes.child.{fails}", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            Child(MODULE, name="child", idle_s=1, silent_s=1)
    (pid,) = {*started} - before
    assert not psutil.pid_exists(pid)
    assert _files() <= files


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))
