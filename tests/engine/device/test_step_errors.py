"""Which errors the engine survives, and which mean that the device is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llorch_worker.contract import InternalError
from llorch_worker.engine import Engine
from llorch_worker.engine.device.step_errors import is_device_lost, is_out_of_memory
from llorch_worker.model import RaggedBatch
from tests.engine.together import all_at_once

NO_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
]
NEITHER = [
    ValueError("a defect"),
    RuntimeError("shapes do not match"),
    ValueError("CUDA error: no"),
]


@pytest.mark.parametrize("error", [*NO_MEMORY, *LOST, *NEITHER], ids=lambda e: str(e)[:40])
def test_out_of_memory_a_lost_device_and_a_defect_are_distinguished(error: Exception) -> None:
    assert is_out_of_memory(error) == (error in NO_MEMORY)
    assert is_device_lost(error) == (error in LOST)


@pytest.mark.parametrize("error", LOST, ids=lambda e: type(e).__name__)
def test_a_lost_device_stops_the_engine_and_fails_every_job(
    loaded: Any, watched: Callable[..., Any], error: Exception
) -> None:
    def lose(step: int, batch: RaggedBatch) -> None:
        if step == 3:
            raise error

    engine: Engine = loaded.engine(model=watched(lose))
    with all_at_once(engine):
        generations = [engine.submit(_request()) for _ in range(3)]
    for generation in generations:
        with pytest.raises(InternalError, match="the engine broke down"):
            generation.result(timeout=60)
    assert not engine.healthy
    with pytest.raises(InternalError):
        engine.submit(_request())
    engine.close()


def _request() -> Any:
    from llorch_worker.contract import GenerationRequest

    return GenerationRequest(prompt="Once upon a time", max_tokens=20, temperature=0)
