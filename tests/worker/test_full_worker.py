"""A worker without room for another job: what is pushed meanwhile costs it nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llorch_worker.client import Client
from tests.services import RedisServer, WorkerProcess, running_worker


@pytest.fixture(scope="module")
def narrow_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """One job at a time."""
    folder = tmp_path_factory.mktemp("narrow")
    with running_worker(
        redis_server.url, folder, model_name="toy", max_sequences=1, TOY_STEP_MS=1
    ) as worker:
        yield worker


def listeners(client: Client) -> set[str]:
    """The connections that hear of changed lists."""
    return {each["id"] for each in client.redis.client_list() if "t" in each["flags"]}


def test_a_full_worker_keeps_the_connection_that_brings_it_news(
    narrow_worker: WorkerProcess, redis_server: RedisServer
) -> None:
    with Client(redis_server.url, model="toy") as client:
        client.submit(prompt="x", max_tokens=1).result(30)
        before = listeners(client)
        assert len(before) == 1
        # Each of them is news to a worker that has no room.
        jobs = [client.submit(prompt="x", max_tokens=20) for _ in range(10)]
        assert [job.result(30).usage.completion for job in jobs] == [20] * 10
        assert listeners(client) == before


def test_an_ended_job_leaves_no_lease(
    narrow_worker: WorkerProcess, redis_server: RedisServer
) -> None:
    from llorch_worker.broker import keys

    with Client(redis_server.url, model="toy") as client:
        job = client.submit(prompt="x", max_tokens=3)
        job.result(30)
        # With its result, in one step.
        assert client.redis.zscore(keys.LEASES, job.id) is None
        assert client.redis.hget(keys.job(job.id), "state") == "ended"
        assert client.redis.hget(keys.job(job.id), "message") is None
