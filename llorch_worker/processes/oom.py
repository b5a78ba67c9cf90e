"""The kernel's killer of processes when memory is short."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from llorch_worker import control_groups
from llorch_worker.control_groups import ROOT

_COUNTERS: Final = {1: "memory.oom_control", 2: "memory.events"}
"""By the version of control groups."""
MORE_LIKELY: Final = 300
"""What a process that shall die first has more than its parent, in thousandths of the memory."""


def oom_kills(root: Path = ROOT) -> int:
    """How many processes of this control group the kernel has killed for want of memory; of this
    machine, if it has no such group. 0 if nobody says."""
    groups = control_groups.folders("memory", root)
    files = [*(folder / _COUNTERS[version] for folder, version in groups), root / "proc/vmstat"]
    found = (_counter(file) for file in files)
    return next((count for count in found if count is not None), 0)


def let_die_first(pid: int) -> None:
    """Has the kernel kill process ``pid`` before this one. Does nothing where that cannot be."""
    proc = ROOT / "proc"
    with suppress(OSError, ValueError):
        own = int((proc / "self/oom_score_adj").read_text())
        (proc / f"{pid}/oom_score_adj").write_text(str(min(1000, own + MORE_LIKELY)))


def _counter(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
