"""Errors for loads that run out of memory or find no compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine.device.step_errors import is_out_of_memory
from llorch_worker.engine.memory.free_memory import free_bytes


@contextmanager
def part_of_load(what: str, device: torch.device, planned_bytes: int) -> Iterator[None]:
    """Runs a part of a load that is planned to take ``planned_bytes`` on ``device``.

    Raises:
        ModelLoadFailed: memory ran out, or Triton found no compiler.
    """
    free = free_bytes(device)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelLoadFailed(
                f"memory ran out on {device} for {what}: {human_bytes(planned_bytes)} was planned "
                f"and {human_bytes(free)} was free; lower max_sequences, max_step_tokens or "
                "max_context, or free memory"
            ) from error
        if is_compiler_missing(error):
            raise ModelLoadFailed(
                "Triton could not compile the launcher of its kernels; install gcc and Python's "
                "headers (python3-dev), or set kernels to torch"
            ) from error
        raise


def is_compiler_missing(error: BaseException) -> bool:
    """Whether Triton found no C compiler, or the compiler failed, as it does without Python.h."""
    if isinstance(error, subprocess.CalledProcessError):
        return "-shared" in error.cmd
    return isinstance(error, RuntimeError) and "Failed to find C compiler" in str(error)
