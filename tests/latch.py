"""What jobs of the toy engine wait for, so that they last as long as their test needs them to."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from tests.waiting import wait_until


class Latch:
    """A file at ``path``: toy jobs with its prompt stop in their midst until :meth:`open`.

    As a context it is open in the end, so that a test that fails leaves no job waiting.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def prompt(self, after: int = 1) -> str:
        """Of a job that stops after so many tokens."""
        return f"wait {after} {self._path}"

    def open(self) -> None:
        """Lets all of them run on, now and from here on."""
        self._path.touch()

    def ended(self) -> int:
        """How many of them have ended in an engine, whether or not Redis knows."""
        return len(list(self._path.parent.glob(f"{self._path.name}.ended-*")))

    def wait_ended(self, jobs: int) -> None:
        """Until so many have."""
        wait_until(lambda: self.ended() == jobs, what=f"{jobs} jobs to end in the engine")
