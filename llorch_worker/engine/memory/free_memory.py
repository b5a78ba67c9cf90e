"""The free memory of a device."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Memory on ``device`` that is free now, within this container's limit."""
    if device.type == "cuda":
        # Otherwise the memory that torch keeps of freed tensors counts as used.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = int(psutil.virtual_memory().available)
    group = _cgroup_free_bytes()
    return free if group is None else min(free, group)


def _cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left below the container's limit, which the machine's own figures ignore."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + _cached_file_bytes(root))


def _cached_file_bytes(root: Path) -> int:
    """Bytes of cached file pages. They count as used, but the kernel drops them on demand."""
    try:
        lines = (root / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(" ", 1) for line in lines)
    return int(sizes.get("inactive_file", 0)) + int(sizes.get("active_file", 0))
