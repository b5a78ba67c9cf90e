"""Each step of a job's way, most of them one script, as the part that runs it calls it.

A step is a generator. Up to its first ``yield`` it prepares, without faults. Up to its second it
acts, and connections break; it goes on as its caller does, until it has an answer or gives up. It
yields the ids of its jobs, and then says what must be true, whatever broke.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from llorch_worker.broker.scripts import source
from llorch_worker.contract import (
    Started,
    Tokens,
)
from tests.faults.proxy import calls, contains
from tests.faults.stage import SCRIPTS, Stage

Acts = Generator[Sequence[str] | None, None, None]
Play = Callable[[Stage], Acts]
STARTED = Started(worker="w@h", model="toy", attempt=1, prompt_tokens=1, queue_ms=0)
TOKENS = Tokens(index=0, ids=(7, 8, 9), text="seven eight nine")


@dataclass(frozen=True)
class Step:
    script: str
    """The script whose call breaks, or another word that marks a request."""
    play: Play

    def __str__(self) -> str:
        return f"{self.script}-{self.play.__name__}"

    def calls(self, request: bytes) -> bool:
        """Whether the request is the one that breaks."""
        script = self.script
        return (calls(script) if script in SCRIPTS else contains(script))(request)

    def has_source(self, request: bytes) -> bool:
        """Whether the request brings the script itself."""
        return contains(source(self.script))(request)


class Steps(list[Step]):
    """The steps of one module."""

    def breaking(self, *scripts: str) -> Callable[[Play], Play]:
        """Adds the decorated function as a step for each of the ``scripts`` that it calls."""

        def add(play: Play) -> Play:
            self.extend(Step(script, play) for script in scripts)
            return play

        return add
