"""A model that notes each of its forward passes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.runner import ForwardModel
from llorch_worker.model import RaggedBatch


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. ``began_s`` and ``ended_s`` on the clock of ``time.perf_counter``."""

    began_s: float
    ended_s: float
    sequences: int
    tokens: int
    kv_blocks: int
    """Held by all sequences together."""
    kv_tokens: int
    """In the KV cache once the step is done, all sequences together."""

    @property
    def decodes_only(self) -> bool:
        return self.tokens == self.sequences


class WatchedModel:
    """Stands in for ``model``; costs about a microsecond a step."""

    def __init__(self, model: ForwardModel) -> None:
        self.model = model
        self._steps: list[Step] = []

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """The model's own logits."""
        began_s = time.perf_counter()
        logits = self.model.forward(batch, cache)
        if logits.is_cuda:
            # The sampler waits for the logits anyway, so this only moves the wait to where it
            # belongs.
            torch.cuda.synchronize(logits.device)
        self._steps.append(
            Step(
                began_s,
                time.perf_counter(),
                len(batch.query_lengths),
                len(batch.token_ids),
                cache.blocks.total - cache.blocks.free_count,
                sum(batch.context_lengths),
            )
        )
        return logits

    def take_steps(self) -> tuple[Step, ...]:
        """The steps since the last call. To be called while the engine is idle."""
        steps, self._steps = tuple(self._steps), []
        return steps
