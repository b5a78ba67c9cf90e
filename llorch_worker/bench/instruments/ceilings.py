"""The machine's ceilings for reading memory and multiplying matrices, measured in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch
import torch.nn.functional as F

from llorch_worker.bench.instruments.provenance import Frozen

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
    """``read_bytes_per_s`` is None, with the reason, if memory is too short to measure it."""

    read_bytes_per_s: float | None
    read_array_bytes: int
    flops_per_s: float
    gemm_shape: tuple[int, int, int]
    """Rows, columns in and columns out of the fastest product."""
    gemm_dtype: str
    not_measured: str | None = None


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Read bandwidth over a large array, and FLOP/s of a large matrix product in ``dtype``.

    Uses torch's current number of threads. Takes some seconds and some memory, which it frees.
    """
    read_bytes = READ_BYTES[device.type]
    shapes = GEMM_SHAPES[device.type]
    flops_per_s, shape = max((_flops_per_s(device, dtype, shape), shape) for shape in shapes)
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available
    fits = read_bytes <= MAX_SHARE_OF_FREE * free
    return Ceilings(
        read_bytes_per_s=_read_bytes_per_s(device, read_bytes) if fits else None,
        read_array_bytes=read_bytes,
        flops_per_s=flops_per_s,
        gemm_shape=shape,
        gemm_dtype=str(dtype).removeprefix("torch."),
        not_measured=None
        if fits
        else f"read bandwidth needs an array of {read_bytes >> 20} MiB, and only "
        f"{int(free) >> 20} MiB are free",
    )


def _read_bytes_per_s(device: torch.device, size_bytes: int) -> float:
    array = torch.ones(size_bytes // 4, dtype=torch.int32, device=device)
    # The fastest counts: some of these may be limited by memory, depending on the machine.
    readings = (
        lambda: array.amax(),
        lambda: array.view(torch.float32).sum(),
        lambda: array.view(torch.int64).sum(),
    )
    return size_bytes / min(_fastest_s(reading, device) for reading in readings)


def _flops_per_s(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    rows, columns_in, columns_out = shape
    x = torch.randn(rows, columns_in, device=device).to(dtype)
    weight = torch.randn(columns_out, columns_in, device=device).to(dtype)
    return 2 * rows * columns_in * columns_out / _fastest_s(lambda: F.linear(x, weight), device)


def _fastest_s(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds that the fastest run takes, not counting the first."""
    taken_s: list[float] = []
    while len(taken_s) <= MIN_RUNS or sum(taken_s) < MIN_MEASURED_S:
        began_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s[1:])
