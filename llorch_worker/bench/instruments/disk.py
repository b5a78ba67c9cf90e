"""Reading files from disk rather than from the page cache."""

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
    """Drop the files from the page cache, except for mapped pages.

    Raises CommandError on a system without such a call.
    """
    if not hasattr(os, "posix_fadvise"):
        raise CommandError("NOT_MEASURED", "this system cannot drop a file from its page cache")
    gc.collect()  # unused mappings
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())  # only pages already written to disk can be dropped
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
    """Bytes that this process has read from disks; None if the system does not report them."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, OSError, psutil.Error):
        return None
