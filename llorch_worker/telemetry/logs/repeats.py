"""Cuts warnings that repeat."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MOST_A_MINUTE = 10
WINDOW_S = 60.0
LOOK_S = 1.0
"""How often the filter looks for warnings whose minute is over."""


@dataclass
class _Repeated:
    since_s: float
    logger: str
    level: int
    passed: int = 0
    left_out: int = 0


class Repeats(logging.Filter):
    """Lets each warning pass :data:`MOST_A_MINUTE` times a minute, and errors that say exactly the
    same. How many were left out is logged with the next line of the log after that minute.

    A warning repeats if its logger and its template are the same: "the lease of job %s was lost"
    for a thousand jobs is one event. Errors that differ, in a job's id for example, are all logged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], _Repeated] = {}
        self._look_at_s = 0.0
        # Reentrant: a signal handler may log while its thread holds the lock.
        self._lock = threading.RLock()

    def filter(self, record: logging.LogRecord) -> bool:
        self._report(self._ended())
        if record.levelno < logging.WARNING or getattr(record, "counts_repeats", False):
            return True
        key = record.name, record.levelno, _repeated_text(record)
        with self._lock:
            repeated = self._seen.setdefault(
                key, _Repeated(self._clock(), record.name, record.levelno)
            )
            if repeated.passed == MOST_A_MINUTE:
                repeated.left_out += 1
                return False
            repeated.passed += 1
            return True

    def _ended(self) -> list[tuple[str, _Repeated]]:
        """Those whose minute is over, with what they said."""
        now_s = self._clock()
        until_s = now_s - WINDOW_S
        with self._lock:
            if now_s < self._look_at_s:
                return []
            self._look_at_s = now_s + LOOK_S
            over = [key for key, repeated in self._seen.items() if repeated.since_s < until_s]
            return [(key[2], self._seen.pop(key)) for key in over]

    def _report(self, ended: list[tuple[str, _Repeated]]) -> None:
        for text, repeated in ended:
            if repeated.left_out:
                logging.getLogger(repeated.logger).log(
                    repeated.level,
                    "%d more like %r were left out within a minute",
                    repeated.left_out,
                    text,
                    extra={"counts_repeats": True},
                )


def _repeated_text(record: logging.LogRecord) -> str:
    """What makes a record a repeat."""
    if record.levelno == logging.WARNING:
        return str(record.msg)
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - the handler reports it, as it does without this filter
        return str(record.msg)
