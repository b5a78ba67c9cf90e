"""The control groups of Linux that this process is in, of either version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path("/")


def folders(
    controller: Literal["cpu", "memory"], root: Path = ROOT
) -> Iterator[tuple[Path, Literal[1, 2]]]:
    """Of this process' group and those around it, from the inside out, each with its version. Some
    may not exist. ``root`` holds ``sys`` and ``proc``."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        mount = root / "sys/fs/cgroup"
        version: Literal[1, 2] = 2
        if controller in controllers.split(","):
            mount, version = mount / controller, 1
        elif controllers:
            continue
        # In a container the path may be the host's, and the mount the group itself.
        inner = mount / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(mount):
                yield folder, version
