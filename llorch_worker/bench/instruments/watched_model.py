"""A model wrapper that records each forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.model import ForwardModel, RaggedBatch


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass on its device: on a card, from its first kernel to its last.

    ``began_s`` and ``ended_s`` are times of ``time.perf_counter``.
    """

    began_s: float
    ended_s: float
    sequences: int
    tokens: int
    kv_blocks: int
    """KV blocks held by all sequences together."""
    kv_tokens: int
    """Tokens in the KV cache after the step, all sequences together."""


Mark = Callable[[], float]
"""A mark on the device's timeline; a call while the device is idle returns its time in seconds."""


class WatchedModel:
    """Replaces ``model``. It never waits for the device, so the engine can still launch the next
    step while one is computed."""

    def __init__(self, model: ForwardModel) -> None:
        self.model = model
        self._origin: tuple[float, torch.cuda.Event] | None = None
        self._noted: list[tuple[Mark, Mark, tuple[int, int, int, int]]] = []

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """The model's own logits."""
        device = batch.token_ids.device
        began = self._mark(device)
        logits = self.model.forward(batch, cache)
        counts = (
            len(batch.query_lengths),
            len(batch.token_ids),
            cache.blocks.total - cache.blocks.free_count,
            sum(batch.context_lengths),
        )
        self._noted.append((began, self._mark(device), counts))
        return logits

    def take_steps(self) -> tuple[Step, ...]:
        """The steps since the last call. Call it while the engine is idle."""
        noted, self._noted = self._noted, []
        # Event times lose precision with their distance from the origin.
        self._origin = None
        return tuple(Step(began(), ended(), *counts) for began, ended, counts in noted)

    def _mark(self, device: torch.device) -> Mark:
        if device.type == "cpu":
            now_s = time.perf_counter()
            return lambda: now_s
        event = torch.cuda.Event(enable_timing=True)
        if self._origin is None:
            # The device is idle, so it reaches the first mark at once.
            self._origin = (time.perf_counter(), event)
        event.record(torch.cuda.current_stream(device))
        origin_s, origin = self._origin

        def at_s() -> float:
            event.synchronize()
            since_ms: float = origin.elapsed_time(event)
            return origin_s + since_ms / 1e3

        return at_s
