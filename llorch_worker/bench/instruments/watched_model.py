"""A model that notes each of its forward passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.runner import ForwardModel
from llorch_worker.model import RaggedBatch


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass where it is computed: on a card, from its first kernel to its last.

    ``began_s`` and ``ended_s`` on the clock of ``time.perf_counter``.
    """

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


Mark = Callable[[], float]
"""A moment; called while the device is idle, it says when it was, in seconds."""


class PassClock(Protocol):
    """Marks moments of the stream that a model runs on, on the clock of ``time.perf_counter``."""

    def mark(self) -> Mark:
        """Now, where the host computes; else when the device gets there. Waits for nothing."""


class HostClock:
    """For the CPU, where a pass is done when it returns."""

    def mark(self) -> Mark:
        """See ``PassClock``."""
        now_s = time.perf_counter()
        return lambda: now_s


class DeviceClock:
    """Events on the current stream: to wait for the device in each pass would keep the engine from
    launching the next one meanwhile."""

    def __init__(self, device: torch.device) -> None:
        """The first mark is taken to be reached at once: the device is idle."""
        self._device = device
        self._origin_s = 0.0
        self._origin: torch.cuda.Event | None = None

    def mark(self) -> Mark:
        """See ``PassClock``."""
        event = torch.cuda.Event(enable_timing=True)
        if self._origin is None:
            self._origin_s, self._origin = time.perf_counter(), event
        event.record(torch.cuda.current_stream(self._device))
        return partial(self._seconds, self._origin, event)

    def _seconds(self, origin: torch.cuda.Event, event: torch.cuda.Event) -> float:
        event.synchronize()
        since_ms: float = origin.elapsed_time(event)
        return self._origin_s + since_ms / 1e3


def pass_clock(device: torch.device) -> PassClock:
    """That of ``device``."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class _Noted:
    """A step whose moments are not known yet."""

    began: Mark
    ended: Mark
    sequences: int
    tokens: int
    kv_blocks: int
    kv_tokens: int

    def step(self) -> Step:
        return Step(
            self.began(),
            self.ended(),
            self.sequences,
            self.tokens,
            self.kv_blocks,
            self.kv_tokens,
        )


class WatchedModel:
    """Stands in for ``model``; costs some microseconds a step and makes nobody wait."""

    def __init__(
        self, model: ForwardModel, clock: Callable[[torch.device], PassClock] = pass_clock
    ) -> None:
        """``clock`` makes the clock of a device."""
        self.model = model
        self._make_clock = clock
        self._clock: PassClock | None = None
        self._noted: list[_Noted] = []

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """The model's own logits."""
        if self._clock is None:
            self._clock = self._make_clock(batch.token_ids.device)
        began = self._clock.mark()
        logits = self.model.forward(batch, cache)
        self._noted.append(
            _Noted(
                began,
                self._clock.mark(),
                len(batch.query_lengths),
                len(batch.token_ids),
                cache.blocks.total - cache.blocks.free_count,
                sum(batch.context_lengths),
            )
        )
        return logits

    def take_steps(self) -> tuple[Step, ...]:
        """The steps since the last call. To be called while the engine is idle."""
        noted, self._noted = self._noted, []
        # A clock of events loses precision with its age.
        self._clock = None
        return tuple(each.step() for each in noted)
