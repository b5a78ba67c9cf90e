"""A full queue refuses jobs by the workers' limit, and a refused job leaves no trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llorch_worker.broker import keys
from llorch_worker.client import AsyncClient, Client
from llorch_worker.contract import QueueFull
from tests.cli.command import Started, run
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, running_worker

GET_S = 60
LIMIT = 3


@pytest.fixture(scope="module")
def one_slot(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """A worker that runs one job and lets three wait."""
    folder = tmp_path_factory.mktemp("one")
    with running_worker(
        redis_server.url, folder, model_name="toy", max_sequences=1, TOY_STEP_MS=5,
        queue_limit=LIMIT,
    ) as worker:  # fmt: skip
        yield worker


@contextmanager
def filled(client: Client) -> Iterator[None]:
    """One running job, and as many waiting ones as the limit allows; at the end there is room."""
    runs = client.submit(prompt="x", max_tokens=4000)
    # Its stream exists from here on.
    next(runs.stream(timeout=GET_S))
    waiting = [client.submit(prompt="x", max_tokens=1) for _ in range(LIMIT)]
    try:
        yield
    finally:
        runs.cancel()
        for job in waiting:
            job.result(GET_S)


def test_clients_obey_the_workers_limit_and_use_room_that_is_free_again(
    one_slot: WorkerProcess, client: Client
) -> None:
    async def refused() -> None:
        async with AsyncClient(client.settings) as other:
            with pytest.raises(QueueFull):
                await other.submit(prompt="x")

    with filled(client):
        before = set(client.redis.keys(keys.job("*")))
        with pytest.raises(QueueFull, match=f"the limit is {LIMIT}"):
            client.submit(prompt="x")
        assert set(client.redis.keys(keys.job("*"))) == before
        asyncio.run(refused())
    assert client.submit(prompt="x", max_tokens=1).result(GET_S).text == "w0 "


def test_the_command_line_reports_a_full_queue_with_its_code(
    one_slot: WorkerProcess, client: Client, redis_server: RedisServer
) -> None:
    with filled(client):
        ran = run("submit", "x", "--json", LLORCH_REDIS_URL=redis_server.url)
    assert ran.code == 1, ran
    assert (ran.json["error"]["code"], ran.json["error"]["retriable"]) == ("QUEUE_FULL", True)


def test_a_file_longer_than_the_queue_waits_for_room(
    one_slot: WorkerProcess,
    client: Client,
    redis_server: RedisServer,
    latch: Latch,
    tmp_path: Path,
) -> None:
    client.submit(prompt=latch.prompt(), max_tokens=2)
    path = tmp_path / "jobs.jsonl"
    path.write_text((json.dumps({"prompt": "x", "max_tokens": 40}) + "\n") * (3 * LIMIT))
    output = tmp_path / "out.jsonl"
    command = Started("batch", "run", path, "-o", output, LLORCH_REDIS_URL=redis_server.url)
    command.wait_for("waiting for room")
    latch.open()
    command.wait_for(f"{3 * LIMIT} lines: {3 * LIMIT} done")
    assert command.ended() == 0
