"""From a torch profile's events to the time of each part: every microsecond counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from llorch_worker.bench.instruments.components import Component
from llorch_worker.bench.instruments.ranges import FORWARD, PREFIX, STEP, range_of

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

PYTHON: Final = "(in Python)"
"""The time of a range in which no operator of torch's runs: Python, or a library called by it."""

_COMPONENTS: Final = {range_of(component): component for component in Component}
_OPERATORS: Final = {"aten::embedding": Component.EMBEDDING}
"""Parts that are one operator and no method."""


@dataclass
class StepTimes:
    """Where the time of some steps in a row went, in microseconds."""

    steps: int = 0
    wall_us: float = 0.0
    """From the start of the first step to the end of the last."""
    own_us: dict[Component, Counter[str]] = field(default_factory=dict)
    """By component, then by operator: what neither has given on to another."""
    calls: Counter[Component] = field(default_factory=Counter)

    def component_us(self, component: Component) -> float:
        return sum(self.own_us.get(component, Counter()).values())

    @property
    def python_us(self) -> float:
        """In no operator of torch's."""
        return sum(operators[PYTHON] for operators in self.own_us.values())


def step_times(events: Iterable[FunctionEvent], wanted: Callable[[str], bool]) -> StepTimes:
    """Of the steps whose forward pass has a name that is ``wanted``; they must lie in a row."""
    steps = sorted(
        (
            event
            for event in events
            if event.name == STEP and any(wanted(each.name) for each in _forwards(event))
        ),
        key=lambda event: event.time_range.start,
    )
    times = StepTimes(steps=len(steps))
    if not steps:
        return times
    times.wall_us = steps[-1].time_range.end - steps[0].time_range.start
    for step in steps:
        _add(times, step, Component.REST)
    between_us = sum(
        late.time_range.start - early.time_range.end for early, late in pairwise(steps)
    )
    times.own_us.setdefault(Component.REST, Counter())[PYTHON] += between_us
    return times


def _forwards(event: FunctionEvent) -> Iterator[FunctionEvent]:
    for child in event.cpu_children:
        if child.name.startswith(FORWARD):
            yield child
        elif child.name.startswith(PREFIX):
            yield from _forwards(child)


def _add(times: StepTimes, event: FunctionEvent, owner: Component) -> None:
    """Adds the event and all below it: to ``owner``, unless it is another component's."""
    operator = event.name
    if event.name.startswith(PREFIX):
        operator = PYTHON
        if event.name.startswith(FORWARD):
            owner = Component.BETWEEN
        elif event.name != STEP:
            owner = _COMPONENTS[event.name]
            times.calls[owner] += 1
    elif event.name in _OPERATORS:
        owner = _OPERATORS[event.name]
        times.calls[owner] += 1
    times.own_us.setdefault(owner, Counter())[operator] += event.self_cpu_time_total
    for child in event.cpu_children:
        _add(times, child, owner)
