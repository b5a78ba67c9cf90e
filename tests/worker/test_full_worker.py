"""A worker with one slot: which job gets it next, and what waiting jobs cost meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.services import RedisServer, WorkerProcess, running_worker, wait_until
from tests.store import record_of

GET_S = 60


@pytest.fixture(scope="module")
def narrow_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """One job at a time."""
    folder = tmp_path_factory.mktemp("narrow")
    with running_worker(
        redis_server.url, folder, model_name="toy", max_sequences=1, TOY_STEP_MS=5
    ) as worker:
        yield worker


def test_high_goes_before_normal_and_normal_before_low_with_stock_producers_between(
    narrow_worker: WorkerProcess, client: Client, stock: Celery
) -> None:
    def stock_job(queue: str = "llorch.toy", **options: int) -> str:
        kwargs = {"prompt": "x", "max_tokens": 1}
        return str(stock.send_task(TASK_NAME, kwargs=kwargs, queue=queue, **options).id)

    def ours(priority: str) -> str:
        return client.submit(prompt="x", max_tokens=1, priority=priority).id

    blocker = client.submit(prompt="x", max_tokens=4000)
    wait_until(lambda: blocker.status().state == "running")
    expected = {
        "low": ours("low"),
        "stock 9": stock_job(priority=9),
        "stock 3": stock_job(priority=3),
        "normal": ours("normal"),
        "stock without": stock_job(),
        "stock 0": stock_job(priority=0),
        "high": ours("high"),
        "stock high": stock_job(queue="llorch.toy:high"),
    }
    blocker.cancel()
    for job_id in expected.values():
        client.job(job_id).result(GET_S)
    log = narrow_worker.text()
    order = sorted(expected, key=lambda name: log.index(f"{expected[name]}] received"))
    # Other steps than 0 and 9 are normal too. The watcher moves their jobs behind those that wait.
    assert "stock 3" in order[2:6]
    order.remove("stock 3")
    assert order == ["high", "stock high", "normal", "stock without", "stock 0", "low", "stock 9"]


def test_a_worker_whose_engine_chose_takes_no_more_jobs_than_that(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    """The others are free for another worker."""
    settings = {"model_name": "toy", "TOY_STEP_MS": 5, "TOY_ROOM": 3}
    with running_worker(own_server.url, tmp_path, **settings) as worker:
        jobs = [own_client.submit(prompt="x", max_tokens=4000) for _ in range(5)]

        def states() -> Counter[str]:
            return Counter(job.status().state for job in jobs)

        wait_until(lambda: states()["running"] == 3)
        next(job for job in jobs if job.status().state == "running").cancel()
        wait_until(lambda: states() == {"running": 3, "queued": 1, "cancelled": 1})
        card = worker.card()
        assert card is not None
        assert card.max_sequences == 3
        for job in jobs:
            job.cancel()


def listeners(client: Client) -> set[str]:
    """The connections that hear of changed lists."""
    return {each["id"] for each in client.redis.client_list() if "t" in each["flags"]}


def test_a_full_worker_keeps_the_connection_that_brings_it_news(
    narrow_worker: WorkerProcess, client: Client
) -> None:
    client.submit(prompt="x", max_tokens=1).result(120)
    before = listeners(client)
    assert before
    # Each of them is news to a worker that has no room.
    jobs = [client.submit(prompt="x", max_tokens=20) for _ in range(10)]
    assert [job.result(120).usage.completion for job in jobs] == [20] * 10
    assert listeners(client) == before


def state_of(client: Client, job_id: str) -> str:
    return client.job(job_id).status().state


@pytest.mark.parametrize("by_stock", [False, True])
def test_a_worker_without_room_runs_a_high_job_at_once(
    narrow_worker: WorkerProcess, client: Client, stock: Celery, by_stock: bool
) -> None:
    blocker = client.submit(prompt="x", max_tokens=4000, priority="low").id
    wait_until(lambda: state_of(client, blocker) == "running")
    waiting = client.submit(prompt="x", max_tokens=1).id
    if by_stock:
        kwargs = {"prompt": "x", "max_tokens": 3}
        high = stock.send_task(TASK_NAME, kwargs=kwargs, queue="llorch.toy:high").id
    else:
        high = client.submit(prompt="x", max_tokens=3, priority="high").id
    assert client.job(high).result(GET_S).usage.completion == 3
    assert [state_of(client, job_id) for job_id in (blocker, waiting)] == ["running", "queued"]
    client.job(blocker).cancel()
    client.job(waiting).result(GET_S)


def test_a_worker_without_room_holds_no_more_high_jobs_than_it_can_run(
    narrow_worker: WorkerProcess, client: Client
) -> None:
    blocker = client.submit(prompt="x", max_tokens=4000, priority="low").id
    wait_until(lambda: state_of(client, blocker) == "running")
    first, second = (
        client.submit(prompt="x", max_tokens=4000, priority="high").id for _ in range(2)
    )
    wait_until(lambda: state_of(client, first) == "running")
    # The worker's record, not a pause, says that it did not take the second with the first.
    assert record_of(client.redis, second).get("state") == "waiting"
    client.job(first).cancel()
    wait_until(lambda: state_of(client, second) == "running")
    for job_id in (second, blocker):
        client.job(job_id).cancel()
