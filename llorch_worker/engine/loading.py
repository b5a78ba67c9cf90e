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
    arithmetic: str = ""
    """See ``LoadPlan.arithmetic``."""
    workspace_bytes: int = 0
    """What the plan gives to the steps."""

    def parts(self) -> dict[str, object]:
        """What keeps tensors on the device, by name."""
        return {"weights": self.model, **self.cache.parts()}

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of :meth:`parts`."""
        return {"weights": self.model.weight_bytes, **self.cache.bytes_by_part()}


def load_as_planned(
    plan: LoadPlan, progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Loads the weights and allocates the cache, with fewer KV blocks than planned if less memory
    is free.

    Raises ``ModelLoadFailed`` if memory does not suffice or the weights are damaged.
    """
    device = plan.device
    model = _load_weights(plan, progress)
    # The caller has loaded the tokenizer: what is free now is free beside it.
    fitted = plan.fitted_to(free_bytes(device)).require_fit()
    if fitted.num_blocks < plan.num_blocks:
        logger.info("%d of %d planned KV blocks fit", fitted.num_blocks, plan.num_blocks)
    with part_of_load("the cache", device, sum(fitted.cache_bytes.values())):
        cache = UnifiedCache.allocate(fitted.shape, fitted.num_blocks)
    if device.type == "cuda":
        # A load may use more memory than any step.
        torch.cuda.reset_peak_memory_stats(device)
    with part_of_load("a step", device, plan.workspace_bytes):
        loaded = LoadedModel(
            model,
            cache,
            _recorded(model, cache),
            arithmetic=plan.arithmetic,
            workspace_bytes=plan.workspace_bytes,
        )
    # From here on the engine's thread computes; a second pool of threads would compete with it.
    end_own_threads()
    return loaded


def _load_weights(plan: LoadPlan, progress: Callable[[int, int], None] | None) -> Transformer:
    ops = plan.kernels.ops
    logger.info(
        "kernels: %s for %s on %s: %s", ops.name, plan.dtype, plan.device, plan.kernels.reason
    )
    with part_of_load("the weights", plan.device, plan.weights_bytes):
        return Transformer.load(
            plan.checkpoint,
            plan.config,
            dtype=plan.dtype,
            device=plan.device,
            linears=plan.linears,
            ops=ops,
            progress=progress,
        )


def _recorded(model: Transformer, cache: UnifiedCache) -> ForwardModel:
    """``model`` with its decode steps recorded, if the cache has buffers for that."""
    if cache.decode is None:
        return model
    return DecodeGraphs(model, cache, CudaRecorder(cache.shape.device))
