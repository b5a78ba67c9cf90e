"""One job wakes one worker, whoever pushed it and whoever dies.

Tests that leave the workers as they were share three: ``fleet`` on ``redis_server``. The others
have three of their own: ``own_fleet`` on ``own_server``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
import redis
from celery import Celery

from llorch_worker.broker import keys, queues, scripts
from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import Client, Job
from llorch_worker.contract import TASK_NAME
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, begun, wait_until
from tests.store import held_ids, record_of

GET_S = 60
WAKE_KEY = keys.wake("llorch.toy")


@contextmanager
def three_workers(client: Client, folder: Path) -> Iterator[list[WorkerProcess]]:
    """Three workers for two jobs each. The first is the watcher."""
    started: list[WorkerProcess] = []

    def start(name: str) -> WorkerProcess:
        worker = WorkerProcess(
            client.settings.redis_url, folder / f"{name}.log", name=name,
            model_name="toy", max_sequences=2, TOY_STEP_MS=5,
        )  # fmt: skip
        started.append(worker)
        return worker

    try:
        start("w1").wait_ready()
        wait_until(lambda: len(watchers(client.redis)) == 1)
        for worker in [start("w2"), start("w3")]:
            worker.wait_ready()
        all_wait(client.redis)
        yield started
    finally:
        for worker in started:
            worker.process.terminate()
        for worker in started:
            worker.stop()


@pytest.fixture(scope="module")
def shared_workers(
    client: Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[WorkerProcess]]:
    with three_workers(client, tmp_path_factory.mktemp("fleet")) as workers:
        yield workers


@pytest.fixture
def fleet(client: Client, shared_workers: list[WorkerProcess]) -> list[WorkerProcess]:
    """The shared workers, all of which wait."""
    all_wait(client.redis)
    return shared_workers


@pytest.fixture
def own_fleet(own_client: Client, tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    with three_workers(own_client, tmp_path) as workers:
        yield workers


def all_wait(store: redis.Redis) -> None:
    """Waits until three workers wait for a wake-up."""
    wait_until(lambda: waiting(store) == 3)


def watchers(store: redis.Redis) -> set[str]:
    """The connections that hear of changed lists."""
    return {each["id"] for each in store.client_list() if "B" in each["flags"]}


def waiting(store: redis.Redis) -> int:
    """How many workers wait for a wake-up."""
    # Each worker also waits for questions about tokens.
    blocked = [each for each in store.client_list() if each["cmd"] == "blpop"]
    return len([each for each in blocked if "b" in each["flags"]]) - 3


class Claims:
    """Counts the claims of workers with room."""

    def __init__(self, server: RedisServer) -> None:
        self.count = 0
        self._server = server
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._listening = threading.Event()

    def _listen(self) -> None:
        with connect(self._server.url) as client, client.monitor() as monitor:
            self._listening.set()
            while '"ECHO"' not in (line := monitor.connection.read_response()):
                # redis-py's parser of these lines fails with Valkey, which does not escape quotes.
                if f'"EVALSHA" "{scripts.digest("claim")}"' in line:
                    asked = line.replace("\\", "")
                    self.count += '"urgent": false' in asked

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        with connect(self._server.url) as client:
            client.echo("the end")
        self._thread.join()


def stock_job(
    server: RedisServer,
    client: Client,
    queue: str = "llorch.toy",
    prompt: str = "x",
    priority: int | None = None,
) -> Job:
    """A job that is only pushed."""
    with Celery("stock", broker=server.url, set_as_current=False) as stock:
        kwargs = {"prompt": prompt, "max_tokens": 2}
        if priority is not None:
            stock.conf.broker_transport_options = {"priority_steps": [*queues.PRIORITY_STEPS]}
        sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=queue, priority=priority)
        return client.job(sent.id)


def assert_each_wakes_one(server: RedisServer, client: Client, run: Callable[[], object]) -> None:
    """Of five jobs that ``run`` runs to their ends, each makes one worker claim."""

    def woken() -> int:
        with Claims(server) as claims:
            for _ in range(5):
                run()
                wait_until(lambda: waiting(client.redis) == 3)
        return claims.count

    # On a busy machine a worker may answer its wake-up so late that the watcher sends another,
    # and it may find a job when it looks by itself.
    counts = []
    for _ in range(3):
        counts.append(woken())
        if counts[-1] == 5:
            return
    raise AssertionError(f"five jobs woke {counts} workers")


def test_one_job_of_our_client_wakes_one_worker(
    redis_server: RedisServer, client: Client, fleet: list[WorkerProcess]
) -> None:
    assert_each_wakes_one(
        redis_server, client, lambda: client.submit(prompt="x", max_tokens=2).result(GET_S)
    )


@pytest.mark.parametrize(
    ("queue", "priority"), [("llorch.toy", None), ("llorch.toy:high", None), ("llorch.toy", 5)]
)
def test_one_job_of_a_stock_producer_wakes_one_worker(
    redis_server: RedisServer,
    client: Client,
    fleet: list[WorkerProcess],
    queue: str,
    priority: int | None,
) -> None:
    assert_each_wakes_one(
        redis_server,
        client,
        lambda: stock_job(redis_server, client, queue, priority=priority).result(GET_S),
    )


def test_workers_are_woken_one_after_another(
    redis_server: RedisServer, client: Client, fleet: list[WorkerProcess]
) -> None:
    ran = []
    # Not strictly: a worker that has waited for some seconds looks, and then waits again, last.
    for _ in range(12):
        ran.append(client.submit(prompt="x", max_tokens=2).result(GET_S).worker)
        wait_until(lambda: waiting(client.redis) == 3)
    assert len(set(ran)) == 3


def test_jobs_that_are_pushed_at_once_spread_over_all_workers(
    redis_server: RedisServer,
    client: Client,
    fleet: list[WorkerProcess],
    tmp_path: Path,
) -> None:
    def holders(name: str) -> int:
        """Of three jobs, which all wait before the first is claimed."""
        with Latch(tmp_path / name) as latch:
            prompt = latch.prompt()
            jobs = [stock_job(redis_server, client, "elsewhere", prompt) for _ in range(3)]
            client.redis.rename("elsewhere", "llorch.toy")
            wait_until(lambda: len(held_ids(client.redis)) == 3)
            return len({record_of(client.redis, job.id).get("worker") for job in jobs})

    # A worker whose wait ends by itself at that moment does not answer, and another takes two.
    counts = []
    while counts[-1:] != [3]:
        assert len(counts) < 3, f"three jobs had {counts} workers"
        counts.append(holders(f"latch{len(counts)}"))
        wait_until(lambda: waiting(client.redis) == 3)


def test_a_wake_up_that_nobody_answers_costs_a_second_and_no_job(
    own_server: RedisServer, own_client: Client, own_fleet: list[WorkerProcess]
) -> None:
    """A worker may die, or be suspended, with a wake-up in its hands."""
    # They are suspended one after another, so that the last to wait is the only one to answer.
    with own_fleet[1].paused(), own_fleet[2].paused():
        jobs = [stock_job(own_server, own_client) for _ in range(4)]
        jobs += [own_client.submit(prompt="x", max_tokens=2) for _ in range(4)]
        workers = {job.result(GET_S).worker for job in jobs}
    assert workers == {own_fleet[0].hostname}


def test_another_worker_watches_after_the_watcher_was_killed(
    own_server: RedisServer, own_client: Client, own_fleet: list[WorkerProcess]
) -> None:
    (first,) = watchers(own_client.redis)
    own_fleet[0].process.kill()
    own_fleet[0].wait_exit()
    job = stock_job(own_server, own_client)
    assert job.result(GET_S).text == "w0 w1 "
    wait_until(lambda: watchers(own_client.redis) - {first})
    assert stock_job(own_server, own_client).result(GET_S).text == "w0 w1 "


def test_a_watcher_that_was_suspended_leaves_it_to_its_successor(
    own_server: RedisServer, own_client: Client, own_fleet: list[WorkerProcess]
) -> None:
    (first,) = watchers(own_client.redis)
    with own_fleet[0].paused():
        wait_until(lambda: watchers(own_client.redis) - {first})
        assert stock_job(own_server, own_client).result(GET_S).text == "w0 w1 "
    wait_until(lambda: first not in watchers(own_client.redis))
    assert len(watchers(own_client.redis)) == 1
    assert stock_job(own_server, own_client).result(GET_S).text == "w0 w1 "


def test_stock_jobs_are_claimed_after_redis_was_restarted(
    own_server: RedisServer, own_client: Client, own_fleet: list[WorkerProcess]
) -> None:
    own_server.halt()
    own_server.start()
    jobs = [stock_job(own_server, own_client) for _ in range(6)]
    assert {job.result(GET_S).text for job in jobs} == {"w0 w1 "}
    wait_until(lambda: len(watchers(own_client.redis)) == 1)


def test_a_full_worker_takes_no_wake_up(
    own_server: RedisServer, own_client: Client, own_worker: WorkerProcess
) -> None:
    running = [begun(own_client.submit(prompt="x", max_tokens=4000)) for _ in range(2)]
    waits = stock_job(own_server, own_client)
    wait_until(lambda: own_client.redis.llen(WAKE_KEY) == 1)
    more = [own_client.submit(prompt="x", max_tokens=2) for _ in range(3)]
    assert own_client.redis.llen(WAKE_KEY) == 1
    for job in running:
        job.cancel()
    assert {job.result(GET_S).text for job in (waits, *more)} == {"w0 w1 "}
    wait_until(lambda: not own_client.redis.exists(WAKE_KEY))


def test_a_worker_that_one_claim_filled_takes_no_wake_up(
    own_server: RedisServer, own_client: Client, own_worker: WorkerProcess, latch: Latch
) -> None:
    """It began to wait with the claim."""
    filling = [stock_job(own_server, own_client, "elsewhere", latch.prompt()) for _ in range(2)]
    own_client.redis.rename("elsewhere", "llorch.toy")
    wait_until(lambda: len(held_ids(own_client.redis)) == 2)
    waits = stock_job(own_server, own_client)
    wait_until(lambda: own_client.redis.llen(WAKE_KEY) == 1)
    latch.open()
    assert all(job.result(GET_S) for job in (*filling, waits))


def test_a_worker_that_cancels_its_queues_passes_its_wake_up_on(
    own_server: RedisServer, own_client: Client, own_fleet: list[WorkerProcess]
) -> None:
    with Celery("operator", broker=own_server.url, set_as_current=False) as operator:
        for queue in queues.queues("toy"):
            operator.control.cancel_consumer(
                queue, destination=[own_fleet[0].hostname, own_fleet[1].hostname], reply=True
            )
        for _ in range(4):
            result = own_client.submit(prompt="x", max_tokens=2).result(GET_S)
            assert result.worker == own_fleet[2].hostname
