"""Whoever counts what the engine's steps do."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import StepPlan


class StepObserver(Protocol):
    """Called on the engine's thread. It must neither wait nor raise: every job waits for it."""

    def step(self, plan: StepPlan, sequences: Items[Sequence], now_s: float) -> None:
        """A step was computed, and each of ``sequences`` has a new token at ``now_s``, monotonic
        seconds. The observer keeps ``token_s`` of the sequences."""

    def more(self, tokens: int) -> None:
        """A text got ``tokens`` more in this step: a grammar forced them, or drafts held."""

    def prefilled(self, sequence: Sequence) -> None:
        """The prompt of a sequence that generates nothing was computed."""
