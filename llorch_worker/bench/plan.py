"""What every measurement is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llorch_worker.settings import Settings

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Plan:
    """The model and how often to measure it; the loads are each measurement's own."""

    settings: Settings
    passes: int = 1
    threads: int | None = None
    """CPU threads; None for torch's own number."""
    now: Callable[[str], None] = lambda _what: None
    """Receives the name of each phase as it begins."""
    progress: Callable[[int, int], None] = lambda _done, _total: None
    """Receives the progress of a load of the model, in bytes."""


def thread_environment(threads: int | None) -> dict[str, str]:
    """Environment variables that make a process compute with this many threads."""
    return {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
