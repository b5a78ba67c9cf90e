"""Classifies errors of a step: the device is out of memory, or it is lost."""

from __future__ import annotations

import re
from typing import Final

import torch

_NO_MEMORY = re.compile(
    # torch's CPU allocator; CUDA outside torch's allocator; cuBLAS, cuDNN; Triton.
    r"can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
_LOST_DEVICE = re.compile(r"CUDA error|CUDA driver error|Triton Error \[CUDA\]|CUDNN_STATUS_|NVML")

MEMORY_PAUSE_S: Final = 60.0
"""After so long steps may ask for the memory again that was lacking: what took it may be gone."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out and nothing else is wrong: a smaller step may succeed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def is_device_lost(error: BaseException) -> bool:
    """Whether the driver or the card failed. After a CUDA error every later call of the process on
    the device fails, so the engine cannot continue."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST_DEVICE.search(str(error)))
