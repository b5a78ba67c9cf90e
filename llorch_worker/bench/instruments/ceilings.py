"""The machine's ceilings for reading memory and multiplying matrices, measured in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from llorch_worker.bench.instruments.provenance import Frozen
from llorch_worker.engine.memory.compute_device import free_bytes
from llorch_worker.kernels.arena import Arena

MIN_RUNS = 5
MIN_MEASURED_S = 0.5
"""A ceiling is the best of this many runs, so that disturbances do not count."""
READ_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
"""Far larger than any cache."""
GEMM_SHAPES = {
    "cpu": ((512, 4096, 4096), (1024, 1024, 1024), (2048, 2048, 2048)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
"""Rows, columns in and columns out. The fastest shape depends on the machine."""
MAX_SHARE_OF_FREE = 0.25


class Ceilings(Frozen):
    """What nothing on this machine can exceed."""

    read_bytes_per_s: float
    read_array_bytes: int
    flops_per_s: float
    gemm_shape: tuple[int, int, int]
    """Rows, columns in and columns out of the fastest product."""
    gemm_dtype: str


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Read bandwidth over a large array, and FLOP/s of a large matrix product in ``dtype``.

    Uses torch's current number of threads. Takes some seconds and some memory, which it frees.
    """
    shapes = GEMM_SHAPES[device.type]
    flops_per_s, shape = max((_flops_per_s(device, dtype, shape), shape) for shape in shapes)
    read_bytes = min(READ_BYTES[device.type], int(free_bytes(device) * MAX_SHARE_OF_FREE))
    return Ceilings(
        read_bytes_per_s=_read_bytes_per_s(device, read_bytes // 8 * 8),
        read_array_bytes=read_bytes,
        flops_per_s=flops_per_s,
        gemm_shape=shape,
        gemm_dtype=str(dtype).removeprefix("torch."),
    )


def _read_bytes_per_s(device: torch.device, size_bytes: int) -> float:
    # On the CPU in huge pages, as the weights are: in small ones, a quarter less is read.
    empty = Arena().zeros if device.type == "cpu" else partial(torch.empty, device=device)
    array = empty(size_bytes // 4, dtype=torch.int32).fill_(1)
    # The fastest counts: some of these may be limited by memory, depending on the machine.
    readings = (
        lambda: array.amax(),
        lambda: array.view(torch.float32).sum(),
        lambda: array.view(torch.int64).sum(),
    )
    return size_bytes / min(fastest_s(reading, device) for reading in readings)


def _flops_per_s(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    rows, columns_in, columns_out = shape
    x = torch.randn(rows, columns_in, device=device).to(dtype)
    weight = torch.randn(columns_out, columns_in, device=device).to(dtype)
    return 2 * rows * columns_in * columns_out / fastest_s(lambda: F.linear(x, weight), device)


def fastest_s(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds that the fastest run takes, not counting the first."""
    taken_s: list[float] = []
    while len(taken_s) <= MIN_RUNS or sum(taken_s) < MIN_MEASURED_S:
        began_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s[1:])
