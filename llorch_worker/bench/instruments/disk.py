"""Reading files from their disk rather than from the system's copy of them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from llorch_worker.contract.command_errors import CommandError

READ_BYTES = 4 * 2**20


def drop_cached(files: Sequence[Path]) -> None:
    """Make the system forget its copy of the files, except for what is mapped.

    Raises CommandError on a system that has no such call.
    """
    if not hasattr(os, "posix_fadvise"):
        raise CommandError("NOT_MEASURED", "this system cannot drop its copy of a file")
    gc.collect()  # mappings that nobody uses any more
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())  # only what is on the disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_s(files: Sequence[Path]) -> float:
    """Seconds that one thread takes to read all files, one after another."""
    buffer = bytearray(READ_BYTES)
    began_s = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began_s


def bytes_from_disk() -> int | None:
    """What this process has read from disks so far; None if the system does not tell."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, OSError, psutil.Error):
        return None
