"""Which texts a step of an encoder takes while time passes and memory is short."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from llorch_worker.engine.device.step_errors import MEMORY_PAUSE_S
from llorch_worker.engine.interface import ModelFacts
from llorch_worker.engine.stats import Counters
from llorch_worker.engine.texts_core import TextsCore
from llorch_worker.engine.texts_generation import TextsGeneration
from llorch_worker.intake.texts import PreparedTexts
from llorch_worker.model.encoder import Texts
from llorch_worker.processes.board import Board

LOW_WAITS_S = 60.0


class Clocked:
    """A core whose time passes as its tests say. Each step says which jobs it had, by the ids of
    their tokens."""

    def __init__(self, step_tokens: int) -> None:
        self.now_s = 1000.0
        self.room = step_tokens
        """Tokens for which there is memory."""
        self.steps: list[list[int]] = []
        self._core = TextsCore(
            self._compute,
            step_tokens,
            counters=Counters(),
            low_waits_at_most_s=LOW_WAITS_S,
            board=Board(4),
            clock=lambda: self.now_s,
        )
        self._handles = count(1)
        self._step_lasts_s = 0.0

    def _compute(self, texts: Texts) -> torch.Tensor:
        if len(texts.token_ids) > self.room:
            raise MemoryError
        self.now_s += self._step_lasts_s
        self.steps.append(texts.token_ids.tolist())
        return torch.ones(len(texts.lengths), 1)

    def add(self, token_id: int, texts: int, priority: str = "normal") -> TextsGeneration:
        """A job of so many texts of one token."""
        job = TextsGeneration(
            PreparedTexts("llorch.embed", {"priority": priority}, [[token_id]] * texts, ()),
            ModelFacts("encoder", width=1),
            normalizes=False,
            request_cancel=lambda _: None,
            handle=next(self._handles),
        )
        self._core.add(job)
        return job

    def step(self, lasts_s: float = 0.0) -> list[int]:
        """The tokens of the next step, in order."""
        self.steps.clear()
        self._step_lasts_s = lasts_s
        self._core.step()
        return sorted(self.steps[0]) if self.steps else []


@pytest.mark.parametrize("priority", ["low", "normal"])
def test_a_job_that_has_waited_long_enough_runs_beside_high_ones_to_its_end(priority: str) -> None:
    core = Clocked(step_tokens=4)
    core.add(1, texts=1000, priority="high")
    aged = core.add(2, texts=6, priority=priority)
    assert core.step(LOW_WAITS_S / 2) == [1, 1, 1, 1]
    assert core.step(LOW_WAITS_S / 2) == [1, 1, 1, 1]
    # It waits no more, and still goes on.
    assert [core.step() for _ in range(3)] == [[1, 1, 2, 2]] * 3
    assert aged.done


def test_a_job_does_not_age_while_steps_take_its_texts() -> None:
    core = Clocked(step_tokens=2)
    low = core.add(1, texts=20, priority="low")
    for _ in range(3):
        assert core.step(LOW_WAITS_S) == [1, 1]
    core.add(2, texts=2)
    assert core.step() == [2, 2]
    assert not low.done


def test_a_step_grows_again_once_memory_was_enough_for_a_while() -> None:
    core = Clocked(step_tokens=8)
    core.add(1, texts=1000)
    core.room = 2
    while not core.step():
        pass
    assert len(core.step()) == 2
    core.room = 8
    sizes = []
    for _ in range(3):
        core.now_s += MEMORY_PAUSE_S
        sizes.append(len(core.step()))
    assert sizes == [4, 8, 8]


def test_a_step_that_grew_too_early_waits_as_long_again() -> None:
    core = Clocked(step_tokens=8)
    core.add(1, texts=1000)
    core.room = 2
    while not core.step():
        pass
    core.now_s += MEMORY_PAUSE_S
    assert core.step() == []
    core.now_s += MEMORY_PAUSE_S / 2
    assert len(core.step()) == len(core.step()) == 2
