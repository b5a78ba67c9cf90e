"""A job that kills its engine becomes a dead letter; its neighbours succeed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from celery import Celery
from celery.result import AsyncResult

from llorch_worker.client import Client, Job
from llorch_worker.contract import AttemptsExhausted, Failed
from tests.faults.conftest import StartWorker
from tests.faults.witness import Witness
from tests.services import RedisServer, stock_app, token_ids, wait_until
from tests.store import held_ids, letters_in

END_S = 60
MAX_ATTEMPTS = 3


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
    assert len(claims) == MAX_ATTEMPTS
    assert letter["id"] == job.id
    assert letter["attempts"] == len(claims)
    assert "attempts" in letter["reason"]
    assert all("@test " in line for line in claims)
    assert json.loads(letter["message"])["headers"]["id"] == job.id


@pytest.fixture
def stock(own_server: RedisServer) -> Iterator[Celery]:
    with stock_app(own_server.url) as app:
        yield app


@pytest.mark.parametrize(
    ("names", "prompt"),
    [
        (("w1",), "die at 40"),
        (("w1",), "signal SIGSEGV"),
        (("w1", "w2"), "die"),
        (("w1", "w2"), "hang always"),
    ],
)
def test_poison_costs_three_engines_and_neither_a_worker_nor_another_job(
    client: Client,
    witness: Witness,
    stock: Celery,
    start_worker: StartWorker,
    names: tuple[str, ...],
    prompt: str,
) -> None:
    before = [witness.send(200) for _ in range(2)]
    poison = client.submit(prompt=prompt, max_tokens=1000)
    after = [witness.send(100) for _ in range(6)]
    workers = [start_worker(name, ready=False, watchdog_s=1) for name in names]
    assert_dead(client, stock, poison)
    witness.assert_whole(*before, *after, timeout_s=END_S)
    # A death without progress in a step of others, too.
    assert max(job.result(0).attempts for job in (*before, *after)) <= MAX_ATTEMPTS
    wait_until(lambda: not held_ids(client.redis))
    assert [worker.process.poll() for worker in workers] == [None] * len(names)
    died = sum(worker.text().count("the engine died") for worker in workers)
    assert died == MAX_ATTEMPTS
    tokens = token_ids(poison.stream())
    assert tokens == list(range(len(tokens))), "its stream has no gap and no repeat"
