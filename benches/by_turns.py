"""Functions by turns.

The processor time of one thread depends little on what else the machine does. Several threads need
a real clock, and a quiet machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from llorch_worker.bench.instruments.percentiles import spread_of

PASSES = 5
LEAST_S = 0.2
"""A pass repeats what it measures for at least as long."""


def step_s(step: Callable[[], None], clock: Callable[[], float]) -> float:
    """Time of one step."""
    steps, began_s = 0, clock()
    while steps == 0 or clock() - began_s < LEAST_S:
        step()
        steps += 1
    return (clock() - began_s) / steps


def compare(what: str, steps: dict[str, Callable[[], None]], threads: int = 1) -> None:
    """Print the medians of all, and how many times as fast as the first each is."""
    clock = time.process_time if threads == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for number in range(PASSES):
        for name in list(steps) if number % 2 == 0 else list(reversed(steps)):
            taken[name].append(step_s(steps[name], clock))
    medians_s = {name: statistics.median(all_s) for name, all_s in taken.items()}
    first_s = next(iter(medians_s.values()))
    for name, median_s in medians_s.items():
        spread = f"spread {spread_of(taken[name]):.0%}"
        figures = f"{1e3 * median_s:,.1f} ms ({spread}): {first_s / median_s:.2f}"
        print(f"{what}, {name}: {figures}", flush=True)
