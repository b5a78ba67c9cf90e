"""add_consumer and cancel_consumer pause and resume a worker; it takes jobs from no other queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from llorch_worker.client import Client
from tests.services import RedisServer, WorkerProcess, begun, running_worker, wait_until
from tests.worker.celery.remote import consumed, told

GET_S = 60
OWN = ["llorch.toy:high", "llorch.toy"]


@pytest.fixture
def serving(toy_worker: WorkerProcess, client: Client, stock: Celery) -> Iterator[WorkerProcess]:
    """The worker, which must consume and serve when the test ends."""
    yield toy_worker
    assert client.submit(prompt="x", max_tokens=3).result(GET_S).text == "w0 w1 w2 "
    assert sorted(consumed(stock, toy_worker)) == sorted(OWN)
    assert toy_worker.process.poll() is None
    assert toy_worker.text().count("Connected to redis") == 1, "it never reconnected"


def stock_app(server: RedisServer) -> Celery:
    return Celery("stock", broker=server.url, set_as_current=False)


def pause(stock: Celery, worker: WorkerProcess, queues: list[str]) -> None:
    for queue in queues:
        told(stock, worker, "cancel_consumer", queue=queue)
    wait_until(lambda: not set(queues) & set(consumed(stock, worker)))


def resume(stock: Celery, worker: WorkerProcess, queues: list[str]) -> None:
    for queue in queues:
        assert told(stock, worker, "add_consumer", queue=queue) == {"ok": f"add consumer {queue}"}


@pytest.mark.parametrize("command", ["add_consumer", "cancel_consumer"])
@pytest.mark.parametrize("queue", ["other", "llorch.gpt", "x\x1b[2J" + "y" * 300, None])
def test_a_queue_of_others_is_refused_with_the_ones_that_the_worker_serves(
    serving: WorkerProcess, stock: Celery, command: str, queue: str | None
) -> None:
    reply = told(stock, serving, command, queue=queue)
    assert list(reply) == ["error"]
    assert reply["error"].endswith(f"; it serves {', '.join(OWN)}")
    assert reply["error"].isprintable()
    assert len(reply["error"]) < 300


def test_a_worker_whose_queues_are_all_cancelled_takes_nothing_until_they_come_back(
    serving: WorkerProcess, client: Client, stock: Celery
) -> None:
    running = begun(client.submit(prompt="x", max_tokens=4000))
    pause(stock, serving, OWN)
    waiting = [client.submit(prompt="x", max_tokens=2) for _ in range(8)]
    assert running.status().state == "running"
    assert {job.status().state for job in waiting} == {"queued"}
    resume(stock, serving, OWN)
    for job in waiting:
        assert job.result(GET_S).text == "w0 w1 "
    running.cancel()


def test_a_paused_queue_keeps_its_jobs_while_the_others_are_served(
    serving: WorkerProcess, client: Client, stock: Celery
) -> None:
    pause(stock, serving, ["llorch.toy"])
    waiting = client.submit(prompt="x", max_tokens=2)
    assert client.submit(prompt="x", max_tokens=2, priority="high").result(GET_S)
    assert waiting.status().state == "queued"
    resume(stock, serving, ["llorch.toy"])
    assert waiting.result(GET_S).text == "w0 w1 "


def test_a_queue_that_comes_back_keeps_its_place_in_the_order(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with (
        running_worker(own_server.url, tmp_path, model_name="toy", max_sequences=1) as worker,
        stock_app(own_server) as stock,
    ):
        pause(stock, worker, ["llorch.toy:high"])
        running = begun(own_client.submit(prompt="x", max_tokens=4000))
        jobs = {
            priority: own_client.submit(prompt="x", max_tokens=1, priority=priority)
            for priority in ("low", "normal", "high")
        }
        resume(stock, worker, ["llorch.toy:high"])
        wait_until(lambda: len(consumed(stock, worker)) == len(OWN))
        running.cancel()
        for job in jobs.values():
            job.result(GET_S)
        order = sorted(jobs, key=lambda each: worker.text().index(f"{jobs[each].id}] received"))
        assert order == ["high", "normal", "low"]


def test_a_paused_worker_stays_paused_through_a_reconnect(
    own_server: RedisServer, own_worker: WorkerProcess, own_client: Client
) -> None:
    with stock_app(own_server) as stock:
        pause(stock, own_worker, OWN)
        own_server.halt()
        own_server.start()
        wait_until(lambda: own_worker.text().count("Connected to redis") == 2)
        job = own_client.submit(prompt="x", max_tokens=2)
        # It replies, so its loop turned after the job came.
        assert consumed(stock, own_worker) == []
        assert job.status().state == "queued"
        resume(stock, own_worker, OWN)
        assert job.result(GET_S).text == "w0 w1 "
