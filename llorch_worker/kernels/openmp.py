"""The OpenMP that torch brought along, and the pools of threads that it keeps."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_PAUSE_SOFT = 1
"""``omp_pause_soft`` of the OpenMP specification: give up what can be made again."""


def torch_openmp() -> Path | None:
    """The GNU OpenMP library that this torch brought along, if it did."""
    root = Path(torch.__file__).parent
    for folder in (root / "lib", root.parent / "torch.libs"):
        for found in sorted(folder.glob("libgomp*.so*")):
            return found
    return None


def end_own_threads() -> None:
    """End the OpenMP threads that work for the calling thread; its next parallel work makes more.

    Every thread that ever ran parallel work keeps a pool. With more threads in all pools than there
    are processors the library lets waiting ones sleep at once, and waking them at each of the
    hundred small products of a decode step cost a quarter of its time. So a thread that loads a
    model and then hands it to another ends its own.
    """
    path = torch_openmp()
    if path is None:
        return
    pause = getattr(ctypes.CDLL(str(path)), "omp_pause_resource_all", None)
    if pause is not None:  # OpenMP 5.0
        pause(_PAUSE_SOFT)
