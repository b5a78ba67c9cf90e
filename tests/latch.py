"""A latch holds jobs of the toy engine for as long as a test needs them to run."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from tests.waiting import wait_until


class Latch:
    """Toy jobs with its prompt stop midway until a file exists at ``path``.

    As a context manager it opens on exit, so a failing test leaves no job waiting.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def prompt(self, after: int = 1) -> str:
        """The prompt of a job that stops after ``after`` tokens."""
        return f"wait {after} {self._path}"

    def open(self) -> None:
        """Lets all present and future jobs run on."""
        self._path.touch()

    def ended(self) -> int:
        """How many of the jobs an engine has ended, whether or not Redis knows."""
        return len(list(self._path.parent.glob(f"{self._path.name}.ended-*")))

    def wait_ended(self, jobs: int) -> None:
        """Waits until an engine has ended ``jobs`` of them."""
        wait_until(lambda: self.ended() == jobs, what=f"{jobs} jobs to end in the engine")
