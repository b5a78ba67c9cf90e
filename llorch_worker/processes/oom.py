"""The kernel's killer of processes when memory is short."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")
MORE_LIKELY: Final = 300
"""What a process that shall die first has more than its parent, in thousandths of the memory."""


def oom_kills(root: Path = _ROOT) -> int:
    """How many processes of this control group the kernel has killed for want of memory; of this
    machine, if it has no such group. 0 if nobody says."""
    files = [*_own_groups(root), root / "proc/vmstat"]
    found = (_counter(file) for file in files)
    return next((count for count in found if count is not None), 0)


def let_die_first(pid: int) -> None:
    """Has the kernel kill process ``pid`` before this one. Does nothing where that cannot be."""
    proc = _ROOT / "proc"
    with suppress(OSError, ValueError):
        own = int((proc / "self/oom_score_adj").read_text())
        (proc / f"{pid}/oom_score_adj").write_text(str(min(1000, own + MORE_LIKELY)))


def _own_groups(root: Path) -> list[Path]:
    """The files with the counter of this process' group, the likeliest first."""
    mount = root / "sys/fs/cgroup"
    files = []
    with suppress(OSError):
        for group in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = group.split(":", 2)
            if "memory" in controllers.split(","):  # version 1
                folder, name = mount / "memory", "memory.oom_control"
            elif not controllers:
                folder, name = mount, "memory.events"
            else:
                continue
            # In a container the path may be the host's, and the mount the group itself.
            files += [folder / path.lstrip("/") / name, folder / name]
    return files


def _counter(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
