"""Where the time of an engine's steps goes, by torch's profiler: every microsecond counts once."""

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

from llorch_worker.bench.instruments.ranges import FORWARD, PREFIX, STEP, Component, range_of
from llorch_worker.engine.core import EngineCore

STOP_TIMEOUT_S: Final = 600.0
"""torch sorts all events when a profile stops."""
_COMPONENTS: Final = {range_of(component): component for component in Component}
_OPERATORS: Final = {"aten::embedding": Component.EMBEDDING}
"""Components that are an operator and not a method."""


@contextmanager
def recording(device: torch.device) -> Iterator[profile]:
    """Profile the engine's own thread; enter it while the engine is idle, around one ``run_pass``.

    The profiler sees the thread that starts it, so it starts and stops in the engine's, between
    steps. The first step is left out: it only keeps the engine busy until the load is complete.
    """
    with profile(activities=[ProfilerActivity.CPU]):
        pass  # torch complains unless the thread that loaded it is the first to profile
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
        # The last token is out before its step has ended.
        if not stopped.wait(STOP_TIMEOUT_S):
            raise RuntimeError("the profiled pass did not end")
    finally:
        EngineCore.step = plain_step  # type: ignore[method-assign]


@dataclass
class StepTimes:
    """Where the time of some steps in a row went, in microseconds."""

    steps: int = 0
    wall_us: float = 0.0
    """From the start of the first step to the end of the last."""
    own_us: defaultdict[Component, float] = field(default_factory=lambda: defaultdict(float))
    """Without what a component has passed on to another."""
    calls: Counter[Component] = field(default_factory=Counter)
    python_us: float = 0.0
    """Outside torch's operators: in Python, or in a library that it calls."""


def step_times(events: Iterable[FunctionEvent], wanted: Callable[[str], bool]) -> StepTimes:
    """Of the steps whose forward pass has a ``wanted`` name; they must lie in a row."""
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
    """Add the event and all below it: to ``owner``, unless it belongs to another component."""
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
