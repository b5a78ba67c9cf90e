"""Out of memory: a job waits or fails, its neighbours and the process go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_worker.client import Client
from llorch_worker.contract import OutOfMemory
from tests.faults.conftest import StartWorker
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import RedisServer, held_ids, wait_until

GET_S = 60
PROMPT = "Once upon a time"


def test_a_host_without_memory_for_one_job_fails_that_job_alone(
    client: Client, witness: Witness, start_worker: StartWorker, latch: Latch
) -> None:
    worker = start_worker()
    neighbours = [witness.begun(witness.send(200, latch.prompt(after=199))) for _ in range(3)]
    for _ in range(6):
        with pytest.raises(OutOfMemory):
            client.submit(prompt="raise MemoryError", max_tokens=5).result(GET_S)
    latch.open()
    witness.assert_whole(*neighbours)
    assert [job.result(0).attempts for job in neighbours] == [1, 1, 1]
    wait_until(lambda: not held_ids(client.redis))
    assert worker.process.poll() is None


def test_a_device_without_memory_for_all_preempts_some_and_fails_only_what_never_fits(
    own_server: RedisServer, start_worker: StartWorker, demo_model: Path
) -> None:
    options = {"model": demo_model, "model_name": "demo", "max_sequences": 8}
    ask = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    with Client(own_server.url, model="demo") as client:
        worker = start_worker(app="tests.faults.scarce_app", SCARCE_TOKENS=100, **options)
        alone = client.submit(**ask, max_tokens=40).result(GET_S).text
        # All together they hold some 350 tokens at the end.
        with worker.paused():
            jobs = [client.submit(**ask, max_tokens=40) for _ in range(8)]
            too_large = client.submit(prompt_token_ids=[7] * 150, max_tokens=5)
        assert [job.result(GET_S).text for job in jobs] == [alone] * 8
        assert [job.result(0).attempts for job in jobs] == [1] * 8
        with pytest.raises(OutOfMemory, match="150 tokens"):
            too_large.result(GET_S)
        assert client.submit(**ask, max_tokens=40).result(GET_S).text == alone
        wait_until(lambda: not held_ids(client.redis))
    assert "one waits" in worker.text()
    assert worker.process.poll() is None
