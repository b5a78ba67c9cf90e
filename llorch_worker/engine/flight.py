"""A step between its launch and the delivery of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from llorch_worker.engine.runner import Launch, StepOutput
from llorch_worker.engine.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched, or could not be: its ``error`` is told when it is read."""

    plan: StepPlan
    launch: Launch | None
    error: Exception | None = None

    def read(self) -> StepOutput:
        """Waits for the step. Raises what it raised."""
        if self.launch is None:
            assert self.error is not None
            raise self.error
        return self.launch.read()
