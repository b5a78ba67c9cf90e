"""A device that computes as late as possible: only when a result is awaited."""

from __future__ import annotations

import torch

from llorch_worker.engine.device.queue import Choose, Done, Forward
from llorch_worker.engine.sampling.sampler import Sampled


class LazyQueue:
    """A ``DeviceQueue`` whose work begins when its result, or one launched later, is awaited.

    So the host cannot use a token early, and whatever it changes between launch and wait has
    happened when the step is computed.
    """

    overlaps = True

    def __init__(self) -> None:
        self.unread = 0
        self.most_unread = 0
        self.unread_at_launch: list[int] = []
        """Of each launch, how many were launched before and not read."""
        self._waiting: list[_Lazy] = []

    def launch(self, forward: Forward) -> _Lazy:
        self.unread_at_launch.append(self.unread)
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        lazy = _Lazy(self, forward)
        self._waiting.append(lazy)
        return lazy

    def compute_until(self, last: _Lazy) -> None:
        while not last.computed:
            self._waiting.pop(0).compute()


class _Lazy:
    def __init__(self, queue: LazyQueue, forward: Forward) -> None:
        self.computed = False
        self._queue = queue
        self._forward = forward
        self._choose: Choose | None = None
        self._done: Done | None = None
        self._error: Exception | None = None

    @property
    def token_ids(self) -> torch.Tensor:
        assert self.computed, "the host asked for tokens that the device has not chosen"
        if self._done is None:
            raise RuntimeError("the step before has failed")
        return self._done.token_ids

    def sample(self, choose: Choose) -> None:
        assert not self.computed, "the step was read before it sampled"
        self._choose = choose

    def compute(self) -> None:
        self.computed = True
        try:
            done = Done(self._forward())
            if self._choose is not None:
                done.sample(self._choose)
            self._done = done
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
            self._error = error

    def read(self) -> Sampled | None:
        self._queue.unread -= 1
        self._queue.compute_until(self)
        if self._done is None:
            assert self._error is not None
            raise self._error
        return self._done.read()
