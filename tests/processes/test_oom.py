"""What the kernel says of processes that it killed for want of memory, and whom it kills first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llorch_worker.processes.oom import MORE_LIKELY, let_die_first, oom_kills

GROUP = "/kube/pod/worker"


def machine(root: Path, **files: str) -> Path:
    """``files``: by path, with two underscores for each slash, and a dot for each dash."""
    for name, text in {"proc__self__cgroup": "", "proc__vmstat": "oom_kill 40\n", **files}.items():
        path = root / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "folder", [f"sys__fs__cgroup{GROUP.replace('/', '__')}", "sys__fs__cgroup"]
)
def test_kills_are_those_of_the_own_group(tmp_path: Path, folder: str) -> None:
    events = {f"{folder}__memory-events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"}
    assert oom_kills(machine(tmp_path, proc__self__cgroup=f"0::{GROUP}\n", **events)) == 2


@pytest.mark.parametrize("group", ["/", "/../other", "/../../user.slice/worker"])
def test_in_a_container_the_mount_is_the_own_group(tmp_path: Path, group: str) -> None:
    events = {"sys__fs__cgroup__memory-events": "oom_kill 5\n"}
    assert oom_kills(machine(tmp_path, proc__self__cgroup=f"0::{group}\n", **events)) == 5


def test_kills_of_a_group_of_version_1_are_read_too(tmp_path: Path) -> None:
    groups = f"5:cpu,cpuacct:/other\n4:memory:{GROUP}\n0::/\n"
    control = {f"sys__fs__cgroup__memory{GROUP.replace('/', '__')}__memory-oom_control":
               "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"}  # fmt: skip
    assert oom_kills(machine(tmp_path, proc__self__cgroup=groups, **control)) == 7


def test_without_a_group_they_are_the_machines(tmp_path: Path) -> None:
    assert oom_kills(machine(tmp_path)) == 40
    assert oom_kills(tmp_path / "nothing") == 0


def test_this_machine_says_something() -> None:
    assert oom_kills() >= 0


def test_a_process_is_made_likelier_to_be_killed_than_its_parent() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        let_die_first(child.pid)
        own = int(Path("/proc/self/oom_score_adj").read_text())
        its = int(Path(f"/proc/{child.pid}/oom_score_adj").read_text())
        assert its == min(1000, own + MORE_LIKELY)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    let_die_first(child.pid)  # which is no more
