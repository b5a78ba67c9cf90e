"""How many threads compute a step while other processes want the same processors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from llorch_worker.processors import idle_s, involuntary_switches

logger = logging.getLogger(__name__)

WINDOW_S: Final = 0.1
"""Steps are compared over this long: many time slices of processes that share a processor."""
DISPLACED_PER_S: Final = 100
"""Fewer involuntary switches than this cost nothing: the system's own processes cause them too."""
FIRST_PAUSE_S: Final = 0.2
MOST_PAUSE_S: Final = 10.0
PAUSE_GROWTH: Final = 3
"""Of the pause between two trials, with each that fails: beside other work it may take long."""
IDLE_PACE: Final = 5
"""Each second for which a processor is idle shortens the pause by so many."""
CLEARLY_FASTER: Final = 1.2
"""Fewer threads must be so much faster to stay. Beside other work they are faster by more."""
LEAST_GAIN: Final = 0.1
"""Of the speed that more threads would have if nothing else ran. Else equals would alternate."""
ROWS_OF_ONE_STEP: Final = 16
"""A step of so many rows takes about twice as long as a step of one."""


class ThreadCount:
    """Finds the number of threads that computes fastest, between one and ``most``.

    Threads wait for each other after every product, so one that another process displaces delays
    all. Then fewer threads are faster, because each keeps a processor of its own. If threads are
    displaced, fewer compute for a window; now and then, and soon if a processor is idle, more do.
    The faster number stays. On a machine without other work nothing is tried.

    Not thread-safe: the engine's thread owns it. Results must not depend on the number of threads.
    """

    def __init__(
        self,
        most: int,
        use: Callable[[int], None] = torch.set_num_threads,
        displaced: Callable[[], int] = involuntary_switches,
        idle_s: Callable[[], float] = idle_s,
    ) -> None:
        """``displaced``: how often a thread has lost its processor to another. ``idle_s``: for how
        many seconds processors have been idle, all together."""
        self._most = self._count = most
        self._use, self._displaced, self._idle_s = use, displaced, idle_s
        self._displaced_before, self._idle_before_s = displaced(), 0.0
        self._compared: tuple[int, float] | None = None
        """While a window is a trial: the count and the speed of the window before."""
        self._pause_s, self._next_pause_s, self._fewer = 0.0, FIRST_PAUSE_S, 1
        self._more_next = False
        self._rows, self._seconds = 0, 0.0

    @contextmanager
    def all_threads(self) -> Iterator[None]:
        """For a step that is compared with no other, such as one with a prefill."""
        displaced = self._displaced()
        self._use(self._most)
        try:
            yield
        finally:
            self._use(self._count)
            self._displaced_before += self._displaced() - displaced

    def note(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` has taken this long, with the number of threads set last."""
        self._rows += ROWS_OF_ONE_STEP + rows
        self._seconds += seconds
        if self._seconds >= WINDOW_S:
            self._end_window(self._rows / self._seconds, self._seconds)
            self._rows, self._seconds = 0, 0.0

    def _end_window(self, speed: float, seconds: float) -> None:
        if self._compared is not None:
            self._end_trial(*self._compared, speed)
        else:
            idle_s = 0.0
            if self._count < self._most:
                # Less than before if a processor has gone.
                idle_s = max(0.0, self._idle_s() - self._idle_before_s)
            self._pause_s -= seconds + IDLE_PACE * idle_s
            if self._pause_s <= 0 and (more := self._wanted(round(idle_s / seconds), seconds)):
                self._compared = self._count, speed
                self._set(self._count + more)
        self._displaced_before = self._displaced()
        if self._count < self._most:
            self._idle_before_s = self._idle_s()

    def _wanted(self, idle: int, seconds: float) -> int:
        """How many more threads to try."""
        more = min(max(1, idle), self._most - self._count)
        displaced = self._displaced() - self._displaced_before
        if displaced > DISPLACED_PER_S * seconds:
            fewer = -min(self._fewer, self._count - 1)
            return more or fewer if idle > 0 or self._more_next else fewer or more
        return more

    def _end_trial(self, before: int, speed_before: float, speed: float) -> None:
        self._compared = None
        is_more = self._count > before
        least = 1 + LEAST_GAIN * (self._count / before - 1) if is_more else CLEARLY_FASTER
        if speed > speed_before * least:
            logger.debug("%d threads are faster than %d", self._count, before)
            self._more_next = is_more
            self._pause_s, self._next_pause_s, self._fewer = 0.0, FIRST_PAUSE_S, 1
            return
        if not is_more:
            # Each of several busy processes delays all: one thread fewer changes nothing.
            self._fewer = 1 if self._count == 1 else 2 * self._fewer
        self._more_next = not is_more
        self._set(before)
        self._pause_s = self._next_pause_s
        self._next_pause_s = min(PAUSE_GROWTH * self._pause_s, MOST_PAUSE_S)

    def _set(self, count: int) -> None:
        self._count = count
        self._use(count)
