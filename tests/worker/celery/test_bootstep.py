"""What a worker runs before its first job."""

from __future__ import annotations

from tests.services import WorkerProcess, wait_until


def test_a_ready_worker_keeps_its_heap_from_the_garbage_collector(
    toy_worker: WorkerProcess,
) -> None:
    card = wait_until(toy_worker.card)
    assert card.engine["frozen_objects"] > 10_000
