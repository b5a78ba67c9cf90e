"""The OpenMP library that torch ships, and its pools of threads."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_PAUSE_SOFT = 1
"""``omp_pause_soft`` of the OpenMP specification: release what can be recreated."""


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
