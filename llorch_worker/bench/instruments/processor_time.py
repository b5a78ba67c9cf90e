"""Processor time of this process and its children, thread by thread."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds used up to now."""

    here_s: float
    children_s: dict[tuple[int, int], float]
    """Times of every process that this one started, by process and thread id."""

    @classmethod
    def now(cls) -> Self:
        children_s = {}
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                for thread in child.threads():
                    children_s[child.pid, thread.id] = thread.user_time + thread.system_time
        return cls(time.process_time(), children_s)

    def since_s(self, before: ProcessorTime, without_busiest: int = 0) -> float:
        """Seconds used since ``before``, without those of the children's busiest threads."""
        used_s = sorted(
            total_s - before.children_s.get(thread, 0.0)
            for thread, total_s in self.children_s.items()
        )
        return self.here_s - before.here_s + sum(used_s[: max(0, len(used_s) - without_busiest)])
