"""The OpenMP library that torch ships, and its pools of threads."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from llorch_worker.processors import thread_count

_PAUSE_SOFT = 1
"""``omp_pause_soft`` of the OpenMP specification: release what can be recreated."""

SMALL_MODEL_BYTES = 16 * 2**20
"""Threads wait for each other after every product. For weights of a few MB that takes as long as it
saves, and many times as long while other processes want the processors."""


def cpu_threads(weights_bytes: int) -> int | None:
    """The threads for a model on the CPU: one a core, but one alone for a small model.

    Never more than the caller's own number. None if ``OMP_NUM_THREADS`` is set, which decides.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    most = 1 if weights_bytes <= SMALL_MODEL_BYTES else thread_count()
    return min(most, torch.get_num_threads())


def torch_openmp() -> Path | None:
    """The GNU OpenMP library that this torch ships; None if it ships none."""
    root = Path(torch.__file__).parent
    for folder in (root / "lib", root.parent / "torch.libs"):
        for found in sorted(folder.glob("libgomp*.so*")):
            return found
    return None


def end_own_threads() -> None:
    """End the calling thread's OpenMP pool; its next parallel work starts a new one.

    Every thread that has run parallel work keeps a pool. If all pools together have more threads
    than there are processors, idle threads sleep immediately and must be woken for each product of
    a decode step. So a thread that loads a model and hands it to another one ends its own pool.
    """
    path = torch_openmp()
    if path is None:
        return
    pause = getattr(ctypes.CDLL(str(path)), "omp_pause_resource_all", None)
    if pause is not None:  # OpenMP 5.0
        pause(_PAUSE_SOFT)
