"""A torch profile of the engine's own thread, from the first step of a pass to its last."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from llorch_worker.engine.core import EngineCore

STOP_TIMEOUT_S: Final = 600.0
"""torch puts all events in order when a profile stops."""


class Recording:
    """To be entered while the engine is idle, around one ``run_pass``.

    The profiler sees the thread that starts it, so it starts and stops in the engine's, between
    steps. The first step is left out: it only holds the engine until the load is complete.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        with profile(activities=[ProfilerActivity.CPU]):
            pass  # torch complains unless the thread that loaded it is the first to profile
        self._plain_step = EngineCore.step
        steps = 0

        @wraps(self._plain_step)
        def step(core: EngineCore) -> Any:
            nonlocal steps
            steps += 1
            if steps == 2:
                self._profile.start()
            plan = self._plain_step(core)
            if steps > 1 and not core.has_work:
                self._profile.stop()
                self._stopped.set()
            return plan

        EngineCore.step = step  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The last token is out before its step has ended.
        if error is None and not self._stopped.wait(STOP_TIMEOUT_S):
            raise RuntimeError("the profiled pass did not end")
        EngineCore.step = self._plain_step  # type: ignore[method-assign]

    def events(self) -> Sequence[FunctionEvent]:
        """All ranges and operators, each with those below it. Once the block was left."""
        return self._profile.events() or ()
