"""What jobs of the toy engine wait for, so that they last as long as their test needs them to."""

from __future__ import annotations

from pathlib import Path


class Latch:
    """A file at ``path``: toy jobs with its prompt stop in their midst until :meth:`open`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prompt(self, after: int = 1) -> str:
        """Of a job that stops after so many tokens."""
        return f"wait {after} {self._path}"

    def open(self) -> None:
        """Lets all of them run on, now and from here on."""
        self._path.touch()
