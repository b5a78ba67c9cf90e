"""A job that kills its worker becomes a dead letter; its neighbours succeed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pytest
from celery import Celery
from celery.result import AsyncResult

from llorch_worker.broker import keys
from llorch_worker.client import Client, Job
from llorch_worker.contract import AttemptsExhausted, Failed
from tests.faults.conftest import StartWorker
from tests.faults.witness import Witness
from tests.services import RedisServer, WorkerProcess, stock_app, token_ids, wait_until
from tests.store import held_ids, letters_in

END_S = 60
SUPERVISE_S = 0.05
MAX_DEATHS = 5

Supervise = Callable[..., None]


@pytest.fixture
def supervise(start_worker: StartWorker) -> Iterator[Supervise]:
    """Restarts workers of these names when they die, as systemd or Kubernetes would."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def keep(name: str) -> None:
        worker: WorkerProcess = start_worker(name, ready=False, max_deaths=MAX_DEATHS)
        while not stop.wait(SUPERVISE_S):
            if worker.process.poll() is not None:
                worker = start_worker(name, ready=False, max_deaths=MAX_DEATHS)

    def begin(*names: str) -> None:
        for name in names:
            threads.append(threading.Thread(target=keep, args=(name,), daemon=True))
            threads[-1].start()

    yield begin
    stop.set()
    for thread in threads:
        thread.join()


def assert_dead(client: Client, stock: Celery, job: Job) -> None:
    """The job failed with ATTEMPTS_EXHAUSTED in every view, and left one dead letter."""
    with pytest.raises(AttemptsExhausted):
        job.result(END_S)
    seen = AsyncResult(job.id, app=stock)
    assert seen.state == "FAILURE"
    assert isinstance(seen.result, AttemptsExhausted)
    assert seen.result.code == "ATTEMPTS_EXHAUSTED"
    events = [entry.event for entry in job.stream(timeout=END_S)]
    assert isinstance(events[-1], Failed)
    assert events[-1].error.code == "ATTEMPTS_EXHAUSTED"
    (letter,) = (json.loads(text) for text in letters_in(client.redis))
    claims = letter["history"].splitlines()
    assert len(claims) == MAX_DEATHS
    assert letter["id"] == job.id
    assert letter["attempts"] == len(claims)
    assert "attempts" in letter["reason"]
    assert all("@test " in line for line in claims)
    assert json.loads(letter["message"])["headers"]["id"] == job.id


@pytest.fixture
def stock(own_server: RedisServer) -> Iterator[Celery]:
    with stock_app(own_server.url) as app:
        yield app


@pytest.mark.parametrize(("names", "prompt"), [(("w1",), "die at 40"), (("w1", "w2"), "die")])
def test_only_the_poison_job_fails(
    client: Client,
    witness: Witness,
    stock: Celery,
    supervise: Supervise,
    names: tuple[str, ...],
    prompt: str,
) -> None:
    before = [witness.send(200) for _ in range(2)]
    poison = client.submit(prompt=prompt, max_tokens=1000)
    after = [witness.send(100) for _ in range(6)]
    supervise(*names)
    assert_dead(client, stock, poison)
    witness.assert_whole(*before, *after, timeout_s=END_S)
    attempts = [job.result(0).attempts for job in (*before, *after)]
    assert max(attempts) <= len(client.redis.lrange(keys.DEAD, 0, 0)) * 6, attempts
    wait_until(lambda: not held_ids(client.redis))
    tokens = token_ids(poison.stream())
    assert tokens == list(range(len(tokens))), "its stream has no gap and no repeat"
