"""Redis at maxmemory: new jobs are refused, and accepted jobs run to their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from llorch_worker.client import Client
from llorch_worker.contract import Cancelled
from tests.faults.conftest import StartWorker
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import token_ids, wait_until
from tests.store import held_ids

GET_S = 60


@contextmanager
def no_room(client: Client) -> Iterator[None]:
    """Makes Redis refuse every command that needs memory."""
    client.redis.config_set("maxmemory-policy", "noeviction")
    client.redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.redis.config_set("maxmemory", 0)


def test_running_and_waiting_jobs_end_as_usual(
    client: Client, witness: Witness, start_worker: StartWorker, latch: Latch
) -> None:
    worker = start_worker(max_sequences=2)
    # At 5 ms a token, these outlast three leases.
    running = [witness.begun(witness.send(700, latch.prompt())) for _ in range(2)]
    waiting = [witness.send(20) for _ in range(4)]
    with no_room(client):
        latch.open()
        witness.assert_whole(*running, *waiting)
        assert [job.result(GET_S).attempts for job in (*running, *waiting)] == [1] * 6
        wait_until(lambda: not held_ids(client.redis))
    assert worker.process.poll() is None
    assert "ERROR" not in worker.text()


def test_a_reader_can_follow_and_a_caller_can_cancel(
    client: Client, start_worker: StartWorker, latch: Latch
) -> None:
    start_worker(max_sequences=2)
    followed = client.submit(prompt=latch.prompt(), max_tokens=200)
    running = client.submit(prompt="x", max_tokens=4000)
    waiting = client.submit(prompt="x", max_tokens=4000)
    wait_until(lambda: len(held_ids(client.redis)) == 2)
    with no_room(client):
        latch.open()
        assert len(token_ids(followed.stream(timeout=GET_S))) == 200
        for job in (waiting, running):
            assert job.cancel()
            with pytest.raises(Cancelled):
                job.result(GET_S)


def test_a_worker_starts_and_serves_while_redis_is_full(
    client: Client, witness: Witness, start_worker: StartWorker
) -> None:
    jobs = [witness.send(20) for _ in range(6)]
    with no_room(client):
        worker = start_worker()
        witness.assert_whole(*jobs)
        wait_until(lambda: not held_ids(client.redis))
    wait_until(lambda: worker.card() is not None, what="the worker to be listed")
    assert client.submit(prompt="x", max_tokens=2).result(GET_S).text == "w0 w1 "


REFUSALS = {
    "a replica": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "too few replicas": (
        ("CONFIG", "SET", "min-replicas-to-write", 1),
        ("CONFIG", "SET", "min-replicas-to-write", 0),
    ),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_worker_outlives_a_redis_that_refuses_all_writes(
    client: Client, witness: Witness, start_worker: StartWorker, latch: Latch, reason: str
) -> None:
    refuse, accept = REFUSALS[reason]
    worker = start_worker()
    running = witness.begun(witness.send(200, latch.prompt(after=199)))
    client.redis.execute_command(*refuse)
    try:
        with pytest.raises(redis.ResponseError):
            client.redis.set("x", "y")
        # All its parts connect again while nothing can be written.
        for kind in ("normal", "pubsub"):
            client.redis.client_kill_filter(_type=kind, skipme=True)
        latch.open()
        wait_until(lambda: worker.text().count("Connected to redis") >= 2)
        wait_until(lambda: "Redis refuses, will retry: " in worker.text())
    finally:
        client.redis.execute_command(*accept)
    witness.assert_whole(running, witness.send(20))
    assert worker.process.poll() is None
    assert "Unrecoverable" not in worker.text()
