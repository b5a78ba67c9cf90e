"""Whoever waits for a job that Redis has lost hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from llorch_worker.client import AsyncClient, Client, Job
from llorch_worker.contract import JobLost
from llorch_worker.settings import Settings
from tests.gateway import sse
from tests.gateways import running_gateway
from tests.services import RedisServer, WorkerProcess
from tests.store import jobs_that_wait
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("own_worker")


@pytest.fixture
def client(own_server: RedisServer) -> Iterator[Client]:
    with Client(Settings(redis_url=own_server.url, lease_s=1)) as client:
        yield client


def waiting(client: Client, worker: WorkerProcess) -> Job:
    """A job that no worker takes."""
    worker.stop()
    return client.submit(prompt="x")


def test_readers_of_a_stream_and_of_a_result_hear_of_it(
    client: Client, own_worker: WorkerProcess
) -> None:
    job = waiting(client, own_worker)

    async def read() -> None:
        async with AsyncClient(client.settings) as reader:
            own = reader.job(job.id, known=True)
            for reading in (own.result(120), anext(own.stream(timeout=120))):
                with pytest.raises(JobLost):
                    await reading

    with ThreadPoolExecutor() as threads:
        readers = [
            threads.submit(job.result, 30),
            threads.submit(next, job.stream(timeout=120)),
        ]
        client.redis.flushall()
        asyncio.run(read())
        for each in readers:
            assert isinstance(each.exception(), JobLost)


def test_a_job_that_was_never_known_may_still_come(
    client: Client, own_worker: WorkerProcess
) -> None:
    own_worker.stop()
    with pytest.raises(TimeoutError):
        client.job("another producer's").result(timeout=4)


def test_clients_of_a_gateway_hear_of_it(
    client: Client,
    own_server: RedisServer,
    own_worker: WorkerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLORCH_LEASE_S", "1")
    body = {"model": "toy", "prompt": "x"}
    with (
        running_gateway(own_server.url, tmp_path) as gateway,
        ThreadPoolExecutor() as threads,
        own_worker.paused(),
    ):
        url = f"{gateway.url}/v1/completions"
        asking = [
            threads.submit(httpx.post, url, json=body | more, timeout=60)
            for more in ({}, {"stream": True})
        ]
        job_id = httpx.post(f"{gateway.url}/v1/jobs", json=body).json()["id"]
        wait_until(lambda: jobs_that_wait(client.redis) == 3)
        with httpx.stream("GET", f"{gateway.url}/v1/jobs/{job_id}/events", timeout=60) as events:
            client.redis.flushall()
            assert [event.type for event in sse.events(events.iter_lines())] == ["failed"]
        for each in asking:
            answer = each.result()
            assert answer.status_code == 503
            assert answer.json()["error"]["llorch_code"] == "JOB_LOST"
