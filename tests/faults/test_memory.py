"""A device that runs out of memory: jobs wait or fail; their neighbours and the worker go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_worker.client import Client
from llorch_worker.contract import InternalError, OutOfMemory
from tests.faults.conftest import StartWorker
from tests.services import RedisServer, wait_until
from tests.store import held_ids

GET_S = 60
PROMPT = "Once upon a time"


def test_jobs_that_exceed_the_device_memory_wait_and_only_one_that_never_fits_fails(
    own_server: RedisServer, start_worker: StartWorker, demo_model: Path
) -> None:
    options = {"model": demo_model, "model_name": "demo", "max_sequences": 8}
    ask = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    with Client(own_server.url, model="demo") as client:
        worker = start_worker(app="tests.faults.scarce_app", SCARCE_TOKENS=100, **options)
        alone = client.submit(**ask, max_tokens=40).result(GET_S).text
        # Together the jobs exceed the memory several times over; each alone fits.
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


def test_an_error_that_escapes_the_tracer_still_ends_its_job(
    client: Client, start_worker: StartWorker
) -> None:
    start_worker(app="tests.faults.escaping_app", max_sequences=2)
    job = client.submit(prompt="escape", max_tokens=2)
    with pytest.raises(InternalError, match="escaped"):
        job.result(GET_S)
    assert [entry.event.type for entry in job.stream(timeout=GET_S)] == ["failed"]
    wait_until(lambda: not held_ids(client.redis))
    assert client.submit(prompt="x", max_tokens=2).result(GET_S).text == "w0 w1 "
