"""What a worker runs before its first job."""

from __future__ import annotations

from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest
from llorch_worker.settings import Settings
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.celery import bootstep as step
from tests.services import WorkerProcess, wait_until

A_CARD = Assignment("cuda:0", card=object())  # type: ignore[arg-type]


class NotedEngine:
    max_context = 100

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.requests: list[GenerationRequest] = []
        self.measured_after = 0

    def submit(self, request: GenerationRequest) -> NotedEngine:
        self.requests.append(request)
        return self

    def result(self, _timeout_s: float) -> None:
        pass

    def measure_memory(self) -> None:
        self.measured_after = len(self.requests)


def warmed_up(max_sequences: int, assignment: Assignment) -> Any:
    engine = NotedEngine(max_sequences)
    step._warm_up(engine, Settings(max_step_tokens=64), assignment)  # type: ignore[arg-type]
    assert engine.measured_after == len(engine.requests)
    return engine.requests


@pytest.mark.parametrize("max_sequences", [1, 16, 40])
def test_on_a_card_everyone_samples_at_once_before_memory_is_measured(max_sequences: int) -> None:
    first, *rest = warmed_up(max_sequences, A_CARD)
    assert len(first.prompt_token_ids) == 64
    assert sum(request.n for request in rest) == max_sequences
    assert all(request.top_p < 1 and request.temperature > 0 for request in rest)


def test_on_the_cpu_one_token_warms_up() -> None:
    (request,) = warmed_up(16, Assignment("cpu"))
    assert len(request.prompt_token_ids) == 1


def test_a_ready_worker_keeps_its_heap_from_the_garbage_collector(
    toy_worker: WorkerProcess,
) -> None:
    card = wait_until(toy_worker.card)
    assert card.engine["frozen_objects"] > 10_000
