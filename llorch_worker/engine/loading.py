"""Loads weights and cache onto the device, as planned."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.device.graphs import CudaRecorder, DecodeGraphs
from llorch_worker.engine.memory.free_memory import free_bytes
from llorch_worker.engine.memory.load_errors import part_of_load
from llorch_worker.engine.memory.load_plan import LoadPlan
from llorch_worker.kernels import end_own_threads
from llorch_worker.model import ForwardModel, Transformer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """The parts that a load puts on the device."""

    model: Transformer
    cache: UnifiedCache
    steps: ForwardModel
    """``model``, or a wrapper that replays its recorded decode steps."""


def load_as_planned(
    plan: LoadPlan, progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Loads the weights and allocates the cache, with fewer KV blocks than planned if less memory
    is free.

    Raises ``ModelLoadFailed`` if memory does not suffice or the weights are damaged.
    """
    device, kernels = plan.device, plan.kernels
    logger.info(
        "kernels: %s for %s on %s: %s", kernels.ops.name, plan.dtype, device, kernels.reason
    )
    with part_of_load("the weights", device, plan.weights_bytes):
        model = Transformer.load(
            plan.checkpoint,
            plan.config,
            dtype=plan.dtype,
            device=device,
            linears=plan.linears,
            ops=kernels.ops,
            progress=progress,
        )
    fitted = plan.fitted_to(free_bytes(device)).require_fit()
    if fitted.num_blocks < plan.num_blocks:
        logger.info("%d of %d planned KV blocks fit", fitted.num_blocks, plan.num_blocks)
    with part_of_load("the cache", device, sum(fitted.cache_bytes.values())):
        cache = UnifiedCache.allocate(fitted.shape, fitted.num_blocks)
    if device.type == "cuda":
        # A load may use more memory than any step.
        torch.cuda.reset_peak_memory_stats(device)
    steps: ForwardModel = model
    if cache.decode is not None:
        with part_of_load("a step", device, plan.workspace_bytes):
            steps = DecodeGraphs(model, cache, CudaRecorder(device))
    # From here on the engine's thread computes; a second pool of threads would compete with it.
    end_own_threads()
    return LoadedModel(model, cache, steps)
