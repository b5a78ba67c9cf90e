"""Jobs whose worker died before their first token need not run one after another."""

from __future__ import annotations

from collections.abc import Callable

from llorch_worker.client import Client
from tests.faults.conftest import StartWorker
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import wait_until
from tests.store import held_ids, letters_in


def test_twelve_jobs_killed_before_their_first_token_run_together_in_one_survivor(
    client: Client,
    witness: Witness,
    start_worker: StartWorker,
    make_latch: Callable[[str], Latch],
) -> None:
    together = make_latch("together")
    stuck = start_worker("w1", max_sequences=12, TOY_STEP_MS=60_000)
    jobs = [witness.send(20, together.prompt()) for _ in range(12)]
    wait_until(lambda: len(held_ids(client.redis)) == 12)
    stuck.process.kill()
    start_worker("w2", max_sequences=12)
    for job in jobs:
        witness.begun(job)
    assert not any(witness.ended(job) for job in jobs)
    together.open()
    witness.assert_whole(*jobs)
    assert {job.result(0).attempts for job in jobs} == {2}
    assert not letters_in(client.redis)
