"""Functions by turns, each by the processor time of one thread.

That depends little on what else the machine does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from llorch_worker.bench.instruments.percentiles import spread_of

PASSES = 5
LEAST_S = 0.2
"""A pass repeats what it measures for at least as long."""


def step_s(step: Callable[[], None]) -> float:
    """Processor time of one step."""
    steps, began_s = 0, time.process_time()
    while steps == 0 or time.process_time() - began_s < LEAST_S:
        step()
        steps += 1
    return (time.process_time() - began_s) / steps


def compare(what: str, steps: dict[str, Callable[[], None]]) -> None:
    """Print the medians of all, and how many times as fast as the first each is."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for number in range(PASSES):
        for name in list(steps) if number % 2 == 0 else list(reversed(steps)):
            taken[name].append(step_s(steps[name]))
    medians_s = {name: statistics.median(all_s) for name, all_s in taken.items()}
    first_s = next(iter(medians_s.values()))
    for name, median_s in medians_s.items():
        spread = f"spread {spread_of(taken[name]):.0%}"
        figures = f"{1e3 * median_s:.3g} ms ({spread}): {first_s / median_s:.2f}"
        print(f"{what}, {name}: {figures}", flush=True)
