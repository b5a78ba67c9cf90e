"""Children end with the process that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from queue import SimpleQueue

import pytest

from llorch_worker.stack.children import Child, Program, describe_exit, python
from tests.cli.command import alive, environment
from tests.services import REPOSITORY, wait_until

SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = f"""
import sys, time
from llorch_worker.stack.children import Child, Program, python
child = Child(Program("sleeper", python("-c", {SLEEPER!r})), lambda n, l: print(l, flush=True), id)
time.sleep(600)
"""


def start(code: str) -> tuple[Child, SimpleQueue[str], SimpleQueue[Child]]:
    lines: SimpleQueue[str] = SimpleQueue()
    exits: SimpleQueue[Child] = SimpleQueue()
    program = Program("program", python("-c", code))
    return Child(program, lambda _name, line: lines.put(line), exits.put), lines, exits


def test_lines_arrive_one_by_one_and_the_exit_is_reported() -> None:
    child, lines, exits = start("print('one'); print('two'); raise SystemExit(3)")
    assert exits.get(timeout=60) is child
    assert child.wait(60)
    assert (lines.get_nowait(), lines.get_nowait()) == ("one", "two")
    assert child.exit_code == 3


def test_a_child_has_its_own_process_group_which_ctrl_c_does_not_reach() -> None:
    child, lines, _ = start(SLEEPER)
    try:
        assert int(lines.get(timeout=60)) == child.pid
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    finally:
        child.kill()
        assert child.wait(60)
    assert child.exit_code == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is Linux's prctl")
def test_a_child_dies_when_its_parent_is_killed_without_warning() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait()
        wait_until(lambda: not alive(pid))


def test_a_child_does_not_import_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.py").write_text("raise SystemExit('the wrong tasks')")
    monkeypatch.chdir(tmp_path)
    child, _, exits = start("import tasks")
    exits.get(timeout=60)
    assert child.wait(60)
    assert child.exit_code == 0, child.tail


def test_the_last_words_are_the_error_if_there_is_one() -> None:
    child, _, exits = start("print('error: no such file'); print('bye')")
    exits.get(timeout=60)
    assert child.last_words() == "no such file"


def test_an_exit_is_described_in_words() -> None:
    assert describe_exit(1) == "exit code 1"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-40) == "killed by SIGRTMIN+6"


@pytest.mark.parametrize("extra", ["worker", "server"])
def test_either_extra_for_workers_brings_what_finds_the_port_of_a_child(extra: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert "psutil>=6" in project["optional-dependencies"][extra]
