"""A Redis that refuses: a worker says so once, and serves what it still can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from celery import chain

from llorch_worker.broker import keys, queues
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.cli.checks import served_workers
from llorch_worker.client import AsyncClient, Client
from llorch_worker.contract import TASK_NAME, InternalError, InvalidRequest, Priority
from tests.latch import Latch
from tests.messages import QUEUE, envelope
from tests.services import (
    RedisServer,
    WorkerProcess,
    begun,
    own_redis,
    running_worker,
    stock_app,
    token_ids,
    wait_until,
)
from tests.store import held_ids

GET_S = 60
ATTEMPTS = 30
"""As many as all parts of a worker make in some seconds."""


def become_replica(store: redis.Redis, _: RedisServer) -> None:
    store.execute_command("REPLICAOF", "127.0.0.1", "1")


def lack_replicas(store: redis.Redis, _: RedisServer) -> None:
    store.config_set("min-replicas-to-write", 1)


def fail_to_save(store: redis.Redis, server: RedisServer) -> None:
    store.config_set("save", "3600 1")
    server.lose_folder()
    store.bgsave()
    wait_until(lambda: store.info("persistence")["rdb_last_bgsave_status"] == "err")


def admit_nobody(store: redis.Redis, _: RedisServer) -> None:
    store.config_set("maxclients", 1)
    for kind in ("normal", "pubsub"):
        store.client_kill_filter(_type=kind, skipme=True)


def refused(store: redis.Redis) -> int:
    errors = store.info("errorstats")
    codes = ("READONLY", "NOREPLICAS", "MISCONF")
    counts = [errors.get(f"errorstat_{code}", {}).get("count", 0) for code in codes]
    return int(max(*counts, store.info("stats")["rejected_connections"]))


def accept_again(store: redis.Redis) -> None:
    store.execute_command("REPLICAOF", "NO", "ONE")
    store.config_set("min-replicas-to-write", 0)
    store.config_set("save", "")  # otherwise it would not end without a snapshot
    store.config_set("maxclients", 1000)


@pytest.mark.parametrize(
    ("refuse", "reason"),
    [
        (become_replica, "instance state changed"),
        (lack_replicas, "NOREPLICAS"),
        (fail_to_save, "MISCONF"),
        (admit_nobody, "max number of clients reached"),
    ],
)
def test_a_redis_that_refuses_everybody_costs_one_line(
    tmp_path: Path, latch: Latch, refuse: Callable[[redis.Redis, RedisServer], None], reason: str
) -> None:
    with (
        own_redis() as server,
        running_worker(server.url, tmp_path, model_name="toy") as worker,
        Client(server.url) as client,
        connect(server.url) as store,
    ):
        job = begun(client.submit(prompt=latch.prompt(after=1), model="toy", max_tokens=20))
        refuse(store, server)
        latch.open()
        wait_until(lambda: refused(store) > ATTEMPTS, what="the worker to try in vain")
        accept_again(store)
        assert len(token_ids(job.stream(timeout=GET_S))) == 20
        wait_until(lambda: "Redis serves again" in worker.text())
        lines = [line for line in worker.text().splitlines() if "will retry: " in line]
        assert reason in lines[-1]
        # The clients that were there before were sent away, which is another reason.
        assert len(lines) <= (2 if refuse is admit_nobody else 1)
        assert "Traceback" not in worker.text()


def test_an_end_that_redis_refuses_is_stored_once_it_serves_again(
    tmp_path: Path, latch: Latch
) -> None:
    with (
        own_redis() as server,
        running_worker(server.url, tmp_path, model_name="toy") as worker,
        Client(server.url) as client,
        connect(server.url) as store,
    ):
        job = begun(client.submit(prompt=latch.prompt(after=1), model="toy", max_tokens=2))
        lack_replicas(store, server)
        latch.open()
        latch.wait_ended(1)
        wait_until(lambda: refused(store) > ATTEMPTS, what="the worker to try in vain")
        accept_again(store)
        assert job.result(GET_S).attempts == 1
        assert "Traceback" not in worker.text()


def test_a_job_whose_next_task_finds_redis_full_may_be_sent_again(
    own_server: RedisServer, own_worker: WorkerProcess, own_client: Client, latch: Latch
) -> None:
    store = own_client.redis
    with stock_app(own_server.url) as stock:
        next_task = stock.signature("other.text", queue="other")
        fields = {"prompt": latch.prompt(after=1), "max_tokens": 2}
        first = stock.signature(TASK_NAME, kwargs=fields, queue="llorch.toy")
        chain(first, next_task).apply_async()
        wait_until(lambda: held_ids(store), what="the job to run")
        (job_id,) = held_ids(store)
        store.config_set("maxmemory", 1)
        latch.open()
        with pytest.raises(
            InternalError, match=r"next task could not be sent: .*maxmemory"
        ) as told:
            own_client.job(job_id).result(GET_S)
        assert told.value.retriable
    store.config_set("maxmemory", 0)
    assert own_worker.process.poll() is None


@pytest.mark.parametrize("refuse", [lack_replicas, fail_to_save])
def test_a_stream_can_be_read_while_redis_takes_no_writes(
    tmp_path: Path, refuse: Callable[[redis.Redis, RedisServer], None]
) -> None:
    async def read_async(url: str, job_id: str) -> list[int]:
        async with AsyncClient(url) as client:
            entries = client.job(job_id).stream(timeout=GET_S)
            return token_ids([entry async for entry in entries])

    with (
        own_redis() as server,
        running_worker(server.url, tmp_path, model_name="toy"),
        Client(server.url) as client,
        connect(server.url) as store,
    ):
        job = client.submit(prompt="x", model="toy", max_tokens=5)
        assert job.result(GET_S)
        refuse(store, server)
        assert len(token_ids(job.stream(timeout=GET_S))) == 5
        assert len(asyncio.run(read_async(server.url, job.id))) == 5
        accept_again(store)


def test_parts_that_fail_for_one_reason_share_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    one, two = (RedisOutage(name) for name in ("push", "pop"))
    for error in (redis.ReadOnlyError("READONLY"), redis.ResponseError("NOPERM no pop")):
        for part in (one, two, one):
            part.failed(error)
    one.failed(redis.ReadOnlyError("READONLY"))
    two.failed(redis.ReadOnlyError("READONLY"))
    for _ in range(2):
        one.over()
        two.over()
    assert caplog.messages == [
        "Redis refuses, will retry: READONLY",
        "cannot push, will retry: NOPERM no pop",
        "cannot pop, will retry: NOPERM no pop",
        "Redis refuses, will retry: READONLY",
        "Redis serves again",
    ]


@pytest.mark.parametrize("priority", ["high", "normal", "low"])
def test_a_key_of_another_type_in_an_inbox_stops_that_list_alone_and_is_named(
    own_server: RedisServer, own_worker: WorkerProcess, own_client: Client, priority: Priority
) -> None:
    key = queues.route("toy", priority).list_key
    own_client.redis.set(key, "no list")
    for each in ("high", "normal", "low"):
        job = own_client.submit(prompt="x", max_tokens=2, priority=each)
        assert job.result(GET_S).text == "w0 w1 ", "our client needs no inbox"
    shown = key.replace("\x06\x16", "\\x06\\x16")
    sentence = f"the key {shown} holds a string, not jobs; rename or delete it"
    wait_until(lambda: f"a queue is stopped: {sentence}" in own_worker.text())
    with FleetClient(own_server.url) as fleet:
        assert [load.wrong_keys for load in fleet.fleet().models] == [(sentence,)]
    assert (sentence, "fail") in [
        (check.finding.removeprefix("a queue is stopped: "), check.verdict)
        for check in served_workers(own_server.url, before=())
    ]
    assert "Traceback" not in own_worker.text()


@pytest.mark.parametrize(("policy", "warns"), [("allkeys-lru", True), ("noeviction", False)])
def test_a_worker_warns_at_its_start_of_a_redis_that_deletes_jobs(
    tmp_path: Path, policy: str, *, warns: bool
) -> None:
    with (
        own_redis(options=("--maxmemory-policy", policy)) as server,
        running_worker(server.url, tmp_path, model_name="toy") as worker,
    ):
        said = f"its maxmemory-policy is {policy}; set it to noeviction" in worker.text()
        assert said is warns


def test_a_message_that_cannot_be_refused_now_is_refused_later(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    # Each refusal that fails is an attempt.
    made = {"model_name": "toy", "lease_s": 2, "sweep_s": 0.5, "max_attempts": 1000}
    with running_worker(own_server.url, tmp_path, **made, max_deaths=1000) as worker:
        own_client.redis.set(keys.DEAD, "no list")
        own_client.redis.lpush(QUEUE, json.dumps(envelope(17)))
        wait_until(lambda: "cannot refuse a job now: ResponseError" in worker.text())
        own_client.redis.delete(keys.DEAD)
        with pytest.raises(InvalidRequest, match="its body is not"):
            own_client.job("raw").result(GET_S)
        assert own_client.submit(prompt="x", max_tokens=2).result(GET_S).text == "w0 w1 "
        assert worker.process.poll() is None
