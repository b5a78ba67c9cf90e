"""Runs steps on a device in launch order.

Later work may use the results of earlier work on the device; only the host waits before it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from llorch_worker.engine.sampling.sampler import Chosen, Sampled

Forward = Callable[[], torch.Tensor]
"""The forward pass of a step on the device; returns the logits that are sampled. It must not read
mutable host state."""
Choose = Callable[[torch.Tensor], Chosen]
"""Chooses tokens from these logits, on the device."""


class Pending(Protocol):
    """A step that was launched: a forward pass, and what then samples from its logits."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[rows] int64 on the device, for work that is launched after :meth:`sample`."""

    def sample(self, choose: Choose) -> None:
        """Starts sampling, now or after earlier work; may raise its error. The logits are those of
        the last forward pass: no other may be launched before."""

    def read(self) -> Sampled | None:
        """Waits until the step is done, and returns its tokens if it samples. Raises its error."""


class DeviceQueue(Protocol):
    """Only the engine thread may call it."""

    @property
    def overlaps(self) -> bool:
        """Whether the device computes while the host goes on, so that launching ahead pays."""

    def launch(self, forward: Forward) -> Pending:
        """Starts a step, now or after earlier work; may raise its error."""


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

    def launch(self, forward: Forward) -> Pending:
        """See ``DeviceQueue``."""
        return Done(forward())


class Done:
    """A step whose results can be read without waiting."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits: torch.Tensor | None = logits
        self._chosen: Chosen | None = None

    @property
    def token_ids(self) -> torch.Tensor:
        """See ``Pending``."""
        assert self._chosen is not None
        return self._chosen.token_ids

    def sample(self, choose: Choose) -> None:
        """See ``Pending``."""
        logits, self._logits = self._logits, None
        assert logits is not None
        self._chosen = choose(logits)

    def read(self) -> Sampled | None:
        """See ``Pending``."""
        return None if self._chosen is None else self._chosen.read()


class CudaQueue:
    """The engine thread's stream. Results come back through pinned memory, followed by an event."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def launch(self, forward: Forward) -> Pending:
        """See ``DeviceQueue``."""
        return _OnItsWay(forward(), self._device)


class _OnItsWay(Done):
    def __init__(self, logits: torch.Tensor, device: torch.device) -> None:
        super().__init__(logits)
        self._here: Chosen | None = None
        self._done = torch.cuda.Event()
        self._stream = torch.cuda.current_stream(device)
        self._done.record(self._stream)

    def sample(self, choose: Choose) -> None:
        super().sample(choose)
        assert self._chosen is not None
        self._here = self._chosen.copied(to_host)
        self._done.record(self._stream)

    def read(self) -> Sampled | None:
        self._done.synchronize()
        return None if self._here is None else self._here.read()


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy of ``values`` in the host's memory, complete once the device has done all work that
    was launched before. On the CPU ``values`` itself."""
    if values.is_cpu:
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
    return pinned.copy_(values, non_blocking=True)
