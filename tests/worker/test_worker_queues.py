"""Jobs for one worker alone: it takes them and no other, and they never wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.broker import keys, registry
from llorch_worker.broker.queues import model_of, queues, route, worker_queue
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Cancelled, ModelNotServed
from tests.broker.jobs import DAYS_S, note_seen
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, begun, running_worker, wait_until
from tests.store import held_ids

GET_S = 60
QUEUE = "llorch.toy@w1.test"
LONG = 4000
"""Tokens that nobody waits for."""


def test_a_worker_queue_comes_before_the_shared_queue_of_the_same_priority() -> None:
    assert queues("toy", "gpu0@host") == (
        "llorch.toy@gpu0.host:high", "llorch.toy:high", "llorch.toy@gpu0.host", "llorch.toy",
    )  # fmt: skip
    assert worker_queue("toy", "we:ird name@host.example") == "llorch.toy@we-ird-name.host.example"
    for priority in ("high", "normal", "low"):
        assert model_of(route("toy", priority, "gpu0@host").queue) == "toy"


Pair = tuple[WorkerProcess, WorkerProcess]


@contextmanager
def two_workers(url: str, folder: Path) -> Iterator[Pair]:
    """Two workers of one model with short leases and two jobs at once each."""
    options: dict[str, Any] = {"model_name": "toy", "max_sequences": 2, "TOY_STEP_MS": 5}
    options |= {"lease_s": 3, "sweep_s": 0.5}
    with (
        running_worker(url, folder, name="w1", **options) as first,
        running_worker(url, folder, name="w2", **options) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def pair(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with two_workers(redis_server.url, tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.fixture
def own_pair(own_server: RedisServer, tmp_path: Path) -> Iterator[Pair]:
    """For tests that end a worker."""
    with two_workers(own_server.url, tmp_path) as pair:
        yield pair


@pytest.mark.usefixtures("pair")
def test_jobs_for_one_worker_run_where_they_are_sent_at_every_priority(client: Client) -> None:
    jobs = [
        client.submit(prompt="x", max_tokens=3, priority=priority, worker="w1@test")
        for priority in ("high", "normal", "low")
        for _ in range(4)
    ]
    assert {job.result(GET_S).worker for job in jobs} == {"w1@test"}
    assert not held_ids(client.redis)
    assert not client.redis.keys("llorch.toy*")


@pytest.mark.usefixtures("pair")
def test_a_stock_producer_addresses_a_worker_by_its_queue(stock: Celery) -> None:
    sent = [
        stock.send_task(TASK_NAME, queue=QUEUE, kwargs={"prompt": "x", "max_tokens": 3}, priority=p)
        for p in (None, 3, 9)
    ]
    assert {job.get(timeout=GET_S)["worker"] for job in sent} == {"w1@test"}


def test_a_job_for_one_worker_waits_while_its_worker_is_busy_and_others_are_idle(
    client: Client, pair: Pair
) -> None:
    running = [begun(client.submit(prompt="x", max_tokens=LONG, worker="w1@test")) for _ in "ab"]
    job = client.submit(prompt="x", max_tokens=3, worker="w1@test")
    # The other one has taken and ended a later one by now.
    assert client.submit(prompt="x", max_tokens=3).result(GET_S).worker == "w2@test"
    assert job.status().state == "queued"
    assert running[0].cancel()
    assert job.result(GET_S).worker == "w1@test"
    with pytest.raises(Cancelled):
        running[0].result(GET_S)
    running[1].cancel()


def test_a_claimed_job_of_a_dead_worker_resumes_at_once_elsewhere(
    own_client: Client, own_pair: Pair, latch: Latch
) -> None:
    prompt = latch.prompt(after=299)
    job = begun(own_client.submit(prompt=prompt, max_tokens=300, worker="w1@test"))
    own_pair[0].process.kill()
    own_pair[0].process.wait()
    latch.open()
    result = job.result(GET_S)
    assert (result.worker, result.attempts) == ("w2@test", 2)
    assert result.choices[0].token_ids == tuple(range(300))


def test_what_waits_for_a_worker_that_is_gone_goes_to_all_in_order(
    own_client: Client, own_pair: Pair
) -> None:
    own_pair[0].process.kill()
    own_pair[0].process.wait()
    jobs = [
        own_client.submit(prompt="x", max_tokens=3, priority=p, worker="w1@test")
        for p in ("normal", "high", "low", "normal")
    ]
    # Known, and so within its grace: the jobs wait for it.
    assert own_client.submit(prompt="x", max_tokens=3).result(GET_S).worker == "w2@test"
    assert {job.status().state for job in jobs} == {"queued"}
    note_seen(own_client.redis, QUEUE, ago_s=DAYS_S)
    assert {job.result(GET_S).worker for job in jobs} == {"w2@test"}
    assert {job.result(0).attempts for job in jobs} == {1}
    wait_until(
        lambda: (
            "the worker of llorch.toy@w1.test is gone; any worker may take its 4 jobs"
            in own_pair[1].text()
        )
    )


def test_a_worker_that_comes_back_in_time_finds_its_jobs(
    own_server: RedisServer, own_client: Client, own_pair: Pair, tmp_path: Path
) -> None:
    own_pair[0].stop()
    job = own_client.submit(prompt="x", max_tokens=3, worker="w1@test")
    folder = tmp_path / "again"
    folder.mkdir()
    with running_worker(own_server.url, folder, name="w1", model_name="toy"):
        assert job.result(GET_S).worker == "w1@test"


@pytest.mark.usefixtures("pair")
def test_an_unknown_worker_is_refused(client: Client) -> None:
    with pytest.raises(ModelNotServed, match="no worker 'w9@test' serves 'toy'; there is w1@test"):
        client.submit(prompt="x", worker="w9@test")


def test_rerouted_jobs_keep_their_priority_and_order(own_client: Client) -> None:
    store = own_client.redis
    step = "\x06\x163"
    for suffix in ("", ":high", step):
        store.rpush(f"llorch.toy{suffix}", "waits longest")
        store.lpush(f"{QUEUE}{suffix}", "first", "second")
    note_seen(store, QUEUE, ago_s=DAYS_S)
    assert registry.reroute(store, "toy", 60) == {QUEUE: 6}
    for suffix in ("", ":high", step):
        assert store.lrange(f"llorch.toy{suffix}", 0, -1) == ["second", "first", "waits longest"]
    assert not store.exists(QUEUE)
    assert not store.zcard(keys.live("toy")), "a day later nobody looks there any more"
    note_seen(store, QUEUE)
    store.lpush(QUEUE, "third")
    assert registry.reroute(store, "toy", 0) == {}
