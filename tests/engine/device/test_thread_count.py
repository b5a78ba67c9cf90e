"""How many threads compute: on a machine that is computed here, and that no bit depends on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import pytest
import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import Choice, GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine.device.thread_count import IDLE_PACE, MOST_PAUSE_S, ThreadCount
from llorch_worker.kernels import native_absence
from llorch_worker.model import ForwardModel, RaggedBatch
from tests.sizes import sized

STEP_S = 0.02
"""Of one sequence on one processor."""


@dataclass
class Machine:
    """Processors, and processes that want some of them: threads wait for the one that shares."""

    processors: int
    busy: int = 0
    count: int = 0
    displaced: int = 0
    idle_s: float = 0.0
    history: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = self.processors
        self.threads = ThreadCount(
            self.processors, self._use, lambda: self.displaced, lambda: self.idle_s
        )

    def _use(self, count: int) -> None:
        self.count = count

    def run(self, seconds: float) -> None:
        """Steps whose rows vary, as drafts make them."""
        self.history.clear()
        passed_s = 0.0
        for rows in cycle((1, 4, 9)):
            too_many = self.count + self.busy - self.processors
            speed = self.count * (0.4 if too_many > 0 else 1.0)
            took_s = STEP_S * (16 + rows) / 17 / speed
            self.displaced += round(1000 * took_s) if too_many > 0 else 0
            self.idle_s += max(0, -too_many) * took_s
            self.threads.note(rows, took_s)
            self.history.append(self.count)
            passed_s += took_s
            if passed_s > seconds:
                return

    def share_of(self, count: int) -> float:
        return self.history.count(count) / len(self.history)


def test_while_nothing_else_runs_all_threads_compute_in_every_step() -> None:
    machine = Machine(processors=4)
    machine.run(60)
    assert machine.share_of(4) == 1


@pytest.mark.parametrize(("processors", "busy"), [(2, 1), (4, 1), (16, 5)])
def test_beside_busy_processes_as_many_threads_compute_as_have_a_processor(
    processors: int, busy: int
) -> None:
    machine = Machine(processors, busy)
    machine.run(3)
    machine.run(60)
    assert machine.share_of(processors - busy) > 0.9


def test_all_threads_compute_again_soon_after_a_busy_process_ends() -> None:
    machine = Machine(processors=4, busy=2)
    machine.run(60)
    machine.busy = 0
    machine.run(2 * MOST_PAUSE_S / IDLE_PACE)
    machine.run(60)
    assert machine.share_of(4) == 1


def test_all_threads_compute_nearly_always_if_being_displaced_costs_nothing() -> None:
    machine = Machine(processors=2)
    steps = 0
    for _ in range(2000):
        machine.displaced += 100
        machine.threads.note(1, STEP_S / machine.count)
        steps += machine.count == 2
    assert steps > 0.9 * 2000


class Alternating:
    """A model that computes each step with another number of threads."""

    def __init__(self, model: ForwardModel, counts: tuple[int, ...]) -> None:
        self._model = model
        self._counts: Iterator[int] = cycle(counts)

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        torch.set_num_threads(next(self._counts))
        return self._model.forward(batch, cache)


def test_no_bit_of_an_answer_depends_on_the_number_of_threads(demo_model: Path) -> None:
    if (absence := native_absence()) is not None:
        pytest.skip(absence)

    def answer(*counts: int) -> list[Choice]:
        with Engine.load(
            demo_model,
            device="cpu",
            dtype="bfloat16",
            around_model=lambda model: Alternating(model, counts),
        ) as engine:
            running = [
                engine.submit(
                    GenerationRequest(
                        prompt="Once upon a time " * length,
                        max_tokens=sized(usual=10, full=40),
                        seed=length,
                        logprobs=5,
                        frequency_penalty=0.5,
                        ignore_eos=True,
                    )
                )
                for length in (1, 7, 30)
            ]
            return [choice for each in running for choice in each.result(60).choices]

    assert answer(1) == answer(2) == answer(1, 3, 2)


class Counted:
    """A model that notes how many threads compute each step."""

    def __init__(self, model: ForwardModel, counts: list[int]) -> None:
        self._model = model
        self._counts = counts

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        self._counts.append(torch.get_num_threads())
        return self._model.forward(batch, cache)


def test_a_prefill_computes_with_all_threads_while_decodes_have_fewer(demo_model: Path) -> None:
    counts: list[int] = []
    with Engine.load(
        demo_model, device="cpu", around_model=lambda model: Counted(model, counts)
    ) as engine:
        threads = ThreadCount(2, displaced=lambda: 0, idle_s=lambda: 0.0)
        engine._thread.call(lambda: threads._set(1))
        threads._pause_s = (
            math.inf
        )  # A step of a busy machine fills a window, after which more try.
        engine._core._threads = threads
        engine.submit(GenerationRequest(prompt="Once", max_tokens=4, ignore_eos=True)).result(60)
    assert counts == [2, 1, 1, 1]


def test_a_processor_that_goes_away_prolongs_no_pause() -> None:
    machine = Machine(processors=4, busy=2)
    machine.run(5)
    assert machine.count < 4
    machine.idle_s -= 100_000
    machine.busy = 0
    machine.run(30)
    assert machine.count == 4
