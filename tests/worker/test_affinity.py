"""Whole workers: jobs that begin alike meet, and none waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.fleet.affinity import Affinity
from llorch_worker.broker.queues import place_of
from llorch_worker.client import Client
from llorch_worker.contract import GenerationRequest
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, running_worker, wait_until
from tests.store import held_ids, record_of

GET_S = 60
LOAD = keys.load("llorch.toy")
SLOTS = 2


@pytest.fixture(scope="module")
def fleet(
    redis_server: RedisServer, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, WorkerProcess]]:
    """Three workers that know of each other, by name."""
    folder = tmp_path_factory.mktemp("fleet")
    settings = {"model_name": "toy", "max_sequences": SLOTS, "TOY_STEP_MS": 5}
    # While they start, another seems to watch: so each knows at once that it is not alone.
    client.redis.set(keys.watch("toy"), 1)
    with ExitStack() as running:
        started = [
            running.enter_context(running_worker(redis_server.url, folder, name=name, **settings))
            for name in ("w1", "w2", "w3")
        ]
        client.redis.delete(keys.watch("toy"))
        wait_until(lambda: client.redis.zcard(LOAD) == 3, timeout_s=GET_S)
        yield {worker.hostname: worker for worker in started}


def loads(client: Client) -> set[float]:
    return {jobs for _, jobs in client.redis.zrange(LOAD, 0, -1, withscores=True)}


def run(client: Client, key: str) -> str:
    """Runs a job with this affinity key on an idle fleet; returns the worker that ran it."""
    wait_until(lambda: loads(client) == {0.0})
    return client.submit(prompt="x", max_tokens=2, affinity_key=key).result(GET_S).worker


def test_jobs_that_begin_alike_run_on_one_worker(
    client: Client, fleet: dict[str, WorkerProcess]
) -> None:
    def most_on_one() -> int:
        """Of twelve jobs; workers that share them evenly would run four each."""
        return max(Counter(run(client, "k") for _ in range(12)).values())

    # On a busy machine a worker may answer its wake-up too late and lose jobs to others.
    assert any(most_on_one() >= 9 for _ in range(5))


def test_no_worker_is_idle_while_jobs_that_begin_alike_wait(
    client: Client, fleet: dict[str, WorkerProcess], latch: Latch
) -> None:
    wait_until(lambda: loads(client) == {0.0})
    slots = SLOTS * len(fleet)
    prompt = latch.prompt()
    jobs = [client.submit(prompt=prompt, affinity_key="hot") for _ in range(slots + 2)]
    wait_until(lambda: len(held_ids(client.redis)) == slots)
    wait_until(lambda: not client.redis.exists(LOAD))
    ran = Counter(
        record_of(client.redis, job_id).get("worker") for job_id in held_ids(client.redis)
    )
    assert set(ran.values()) == {SLOTS}
    latch.open()
    for job in jobs:
        job.cancel()
    wait_until(lambda: not held_ids(client.redis))


def test_a_worker_that_drains_gets_no_more_jobs_and_those_placed_with_it_run(
    client: Client, fleet: dict[str, WorkerProcess]
) -> None:
    gone = fleet.pop(run(client, "k"))
    gone.stop()
    assert client.redis.zscore(LOAD, place_of("toy", gone.hostname)) is None
    assert {run(client, "k") for _ in range(3)} <= fleet.keys()


def test_a_worker_that_is_killed_keeps_no_jobs(
    client: Client, fleet: dict[str, WorkerProcess]
) -> None:
    request = GenerationRequest(prompt="x", max_tokens=2, affinity_key="k")
    names = {place_of("toy", name): name for name in fleet}
    candidates = Affinity(client.redis).candidates(request, "toy")
    place = next(each for each in candidates if each in names)
    wait_until(lambda: loads(client) == {0.0})
    gone = fleet.pop(names[place])
    gone.process.kill()
    gone.wait_exit()
    jobs = []
    for _ in range(3):
        # Nobody has noticed, so jobs are placed with it, until it has left two wake-ups.
        client.redis.zadd(LOAD, {place: 0}, xx=True)
        jobs.append(client.submit(request))
    assert {job.result(GET_S).worker for job in jobs} <= fleet.keys()
    assert client.redis.zscore(LOAD, place) is None
