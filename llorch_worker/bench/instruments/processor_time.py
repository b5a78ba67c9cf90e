"""Processor time of this process and of all that it started, thread by thread."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True)
class ProcessorTime:
    """What was taken up to now, in seconds."""

    here_s: float
    children_s: dict[tuple[int, int], float]
    """Of each thread of the processes started here, by process and thread id."""

    @classmethod
    def now(cls) -> Self:
        children_s = {}
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                for thread in child.threads():
                    children_s[child.pid, thread.id] = thread.user_time + thread.system_time
        return cls(time.process_time(), children_s)

    def without_busiest_s(self, before: ProcessorTime, busiest: int) -> float:
        """What was taken since ``before``, less that of so many threads of the children."""
        taken_s = sorted(
            total_s - before.children_s.get(thread, 0.0)
            for thread, total_s in self.children_s.items()
        )
        return self.here_s - before.here_s + sum(taken_s[: max(0, len(taken_s) - busiest)])
