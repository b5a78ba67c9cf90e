"""The time of an engine's steps by component, by torch's profiler. Each microsecond counts once."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any, Final

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benches.profile.ranges import FORWARD, PREFIX, STEP, Component, range_of
from llorch_worker.engine.core import EngineCore

STOP_TIMEOUT_S: Final = 600.0
"""torch sorts all events when a profile stops."""
_COMPONENTS: Final = {range_of(component): component for component in Component}
_OPERATORS: Final = {"aten::embedding": Component.EMBEDDING}
"""Components that are operators rather than methods."""


@contextmanager
def recording(device: torch.device) -> Iterator[profile]:
    """Profile the engine's thread; enter it while the engine is idle, around one ``run_pass``.

    The profiler sees only the thread that starts it, so it starts and stops in the engine's thread,
    between steps. The first step is left out: it only keeps the engine busy until the load is
    complete.
    """
    with profile(activities=[ProfilerActivity.CPU]):
        pass  # torch complains if another thread than the one that loaded it profiles first
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, acc_events=True)
    stopped = threading.Event()
    plain_step, steps = EngineCore.step, 0

    @wraps(plain_step)
    def step(core: EngineCore) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            profiler.start()
        plan = plain_step(core)
        if steps > 1 and not core.has_work:
            profiler.stop()
            stopped.set()
        return plan

    EngineCore.step = step  # type: ignore[method-assign, assignment]
    try:
        yield profiler
        # The last token is delivered before its step ends.
        if not stopped.wait(STOP_TIMEOUT_S):
            raise RuntimeError("the profiled pass did not end")
    finally:
        EngineCore.step = plain_step  # type: ignore[method-assign]


@dataclass
class StepTimes:
    """The time of consecutive steps by component, in microseconds."""

    steps: int = 0
    wall_us: float = 0.0
    """From the start of the first step to the end of the last."""
    own_us: defaultdict[Component, float] = field(default_factory=lambda: defaultdict(float))
    """Without the time in other components that a component calls."""
    calls: Counter[Component] = field(default_factory=Counter)
    python_us: float = 0.0
    """Time outside torch's operators: in Python, or in a library that it calls."""


def step_times(events: Iterable[FunctionEvent], wanted: Callable[[str], bool]) -> StepTimes:
    """The times of the steps whose forward pass has a ``wanted`` name; they must be consecutive."""
    steps = sorted(
        (
            event
            for event in events
            if event.name == STEP and any(wanted(each.name) for each in _forwards(event))
        ),
        key=lambda event: event.time_range.start,
    )
    times = StepTimes(steps=len(steps))
    if steps:
        times.wall_us = steps[-1].time_range.end - steps[0].time_range.start
    for step in steps:
        _add(times, step, Component.REST)
    between_us = sum(
        late.time_range.start - early.time_range.end for early, late in pairwise(steps)
    )
    times.own_us[Component.REST] += between_us
    times.python_us += between_us
    return times


def _forwards(event: FunctionEvent) -> Iterator[FunctionEvent]:
    for child in event.cpu_children:
        if child.name.startswith(FORWARD):
            yield child
        elif child.name.startswith(PREFIX):
            yield from _forwards(child)


def _add(times: StepTimes, event: FunctionEvent, owner: Component) -> None:
    """Add the event and its children to ``owner``, or to the component that they belong to."""
    if event.name.startswith(PREFIX):
        times.python_us += event.self_cpu_time_total
    if event.name.startswith(FORWARD):
        owner = Component.BETWEEN
    elif component := _COMPONENTS.get(event.name) or _OPERATORS.get(event.name):
        owner = component
        times.calls[owner] += 1
    times.own_us[owner] += event.self_cpu_time_total
    for child in event.cpu_children:
        _add(times, child, owner)
