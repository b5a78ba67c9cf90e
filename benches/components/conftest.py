"""Fixtures and helpers of all component benchmarks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benches.components.sizes import HEAD_DIM
from llorch_worker.kernels import Ops, choose_ops

EVICTING_BYTES = 256 * 2**20
"""Larger than the processor's caches."""


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture(scope="module")
def ops(dtype: torch.dtype) -> Ops:
    """The operations that the engine would choose."""
    return choose_ops(torch.device("cpu"), dtype, head_dim=HEAD_DIM).ops


@pytest.fixture(scope="module")
def evict() -> Callable[[], None]:
    """Fills the processor's caches with other data."""
    ballast = torch.zeros(EVICTING_BYTES // 4)

    def fill() -> None:
        ballast.add_(1)

    return fill


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.inference_mode():
        yield


def pytest_benchmark_update_machine_info(machine_info: Any) -> None:
    """Records torch's version, threads and vector unit in saved runs."""
    machine_info["torch"] = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "vector_unit": torch.backends.cpu.get_cpu_capability(),
    }


def pytest_benchmark_update_json(output_json: Any) -> None:
    """Records the command, apart from the machine: comparisons warn when the machine differs."""
    output_json["command"] = shlex.join(["pytest", *sys.argv[1:]])
