"""Runs steps on a device in launch order.

Later work may use the results of earlier work on the device; only the host waits before it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from llorch_worker.engine.sampling.sampler import Chosen, Sampled

Work = Callable[[], Chosen | None]
"""A step on the device; returns None if no token is due. It must not read mutable host state."""


class Pending(Protocol):
    """Work that was launched."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[rows] int64 on the device, for work that is launched later."""

    def read(self) -> Sampled:
        """Waits until the work is done. Raises its error."""


class DeviceQueue(Protocol):
    """Only the engine thread may call it."""

    @property
    def overlaps(self) -> bool:
        """Whether the device computes while the host goes on, so that launching ahead pays."""

    def launch(self, work: Work) -> Pending:
        """Starts ``work``, now or after earlier work; may raise its error."""


def use_device(device: torch.device) -> None:
    """Makes ``device`` the current one of the calling thread. A new thread starts on the first
    card, and Triton launches on the thread's card, wherever the tensors are."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def begin_thread(device: torch.device, num_threads: int | None) -> None:
    """Sets up a thread that computes on ``device``; None leaves torch's number of CPU threads."""
    use_device(device)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def device_queue(device: torch.device) -> DeviceQueue:
    """The queue of ``device``."""
    return CudaQueue(device) if device.type == "cuda" else InlineQueue()


class InlineQueue:
    """A queue that computes at the launch, in the caller's thread."""

    overlaps = False

    def launch(self, work: Work) -> Pending:
        """See ``DeviceQueue``."""
        return Done(work())


class Done:
    """Work whose results can be read without waiting."""

    def __init__(self, chosen: Chosen | None) -> None:
        self._chosen = chosen

    @property
    def token_ids(self) -> torch.Tensor:
        """See ``Pending``."""
        assert self._chosen is not None
        return self._chosen.token_ids

    def read(self) -> Sampled:
        """See ``Pending``."""
        return Sampled([], {}, frozenset()) if self._chosen is None else self._chosen.read()


class CudaQueue:
    """The engine thread's stream. Tokens come back through pinned memory, followed by an event."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def launch(self, work: Work) -> Pending:
        """See ``DeviceQueue``."""
        chosen = work()
        return Done(None) if chosen is None else _OnItsWay(chosen, self._device)


class _OnItsWay:
    def __init__(self, chosen: Chosen, device: torch.device) -> None:
        self.token_ids = chosen.token_ids
        self._here = replace(
            chosen, token_ids=_pinned_copy(chosen.token_ids), peaks=_pinned_copy(chosen.peaks)
        )
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(device))

    def read(self) -> Sampled:
        self._copied.synchronize()
        return self._here.read()


def _pinned_copy(values: torch.Tensor) -> torch.Tensor:
    here = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return here.copy_(values, non_blocking=True)
