"""Fleets in a real Redis Cluster: all that they do, in one slot each; a slot that moves; a master
that dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest
import redis
from celery import Celery, chain, chord
from redis.exceptions import ConnectionError as NoConnection

from llorch_worker.broker import claims, keys
from llorch_worker.broker.connection import connect
from llorch_worker.broker.fleet_client import FleetClient
from llorch_worker.broker.tagged_names import key_prefix, slot_of
from llorch_worker.client import Client, Job
from llorch_worker.contract import TASK_NAME, Cancelled, GenerationResult
from llorch_worker.contract.errors import BrokerRefused, BrokerUnavailable
from llorch_worker.worker.queue_watcher import QueueWatcher
from tests.broker.jobs import push, take
from tests.cli.command import run
from tests.flowers import running_flower
from tests.gateways import running_gateway
from tests.latch import Latch
from tests.redis_cluster import Node, RedisCluster, is_master, redis_cluster
from tests.services import (
    RedisServer,
    WorkerProcess,
    assert_streamed_read_and_cancelled,
    begun,
    held_ids,
    running_worker,
    stock_app,
    token_ids,
    wait_until,
)
from tests.telemetry.exporters import running_exporter
from tests.telemetry.scraping import scrape

GET_S = 60
PLACE = 0
"""The master of the fleet that most tests use. It is the one with a replica."""
FIELDS = {"prompt": "x", "max_tokens": 2}
TEXT = "w0 w1 "
QUICK: dict[str, Any] = {"model_name": "toy", "max_sequences": 4, "TOY_STEP_MS": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def tag(cluster: RedisCluster) -> str:
    return cluster.tag_at(PLACE, "fleet")


@pytest.fixture(scope="module")
def url(cluster: RedisCluster, tag: str) -> str:
    return cluster.url(tag)


@pytest.fixture(scope="module")
def worker(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with running_worker(url, tmp_path_factory.mktemp("w1"), **QUICK) as process:
        yield process


@pytest.fixture
def client(url: str, worker: WorkerProcess) -> Iterator[Client]:
    with Client(url, model="toy") as found:
        yield found


@contextmanager
def stock_producer(cluster: RedisCluster, tag: str) -> Iterator[Celery]:
    """A plain Celery app, which must know the master."""
    with stock_app(cluster.masters[PLACE].server.url) as app:
        prefix = {"global_keyprefix": key_prefix(tag)}
        app.conf.broker_transport_options = app.conf.result_backend_transport_options = prefix
        yield app


@pytest.fixture
def stock(cluster: RedisCluster, tag: str, worker: WorkerProcess) -> Iterator[Celery]:
    with stock_producer(cluster, tag) as app:
        yield app


def test_a_job_is_streamed_read_and_cancelled(client: Client) -> None:
    assert_streamed_read_and_cancelled(
        client, client.redis, tokens=50, within_s=GET_S, tenant="one"
    )


def test_a_stock_producers_jobs_chains_and_chords_run_to_their_ends(
    stock: Celery, client: Client, worker: WorkerProcess
) -> None:
    options = {"kwargs": FIELDS, "queue": "llorch.toy"}
    assert stock.send_task(TASK_NAME, **options).get(timeout=GET_S)["text"] == TEXT
    later = datetime.now(UTC) + timedelta(seconds=1)
    late = stock.send_task(TASK_NAME, eta=later, **options)
    job = stock.signature(TASK_NAME, immutable=True, **options)
    chained = chain(job, job.clone(), app=stock).apply_async()
    assert chained.get(timeout=GET_S)["text"] == TEXT
    chorded = chord([job, job.clone()], job.clone(), app=stock).apply_async()
    assert chorded.get(timeout=GET_S)["text"] == TEXT
    assert late.get(timeout=GET_S)["text"] == TEXT
    endless = stock.send_task(TASK_NAME, kwargs=FIELDS | {"max_tokens": 4000}, queue="llorch.toy")
    wait_until(lambda: held_ids(client.redis) == {endless.id})
    endless.revoke(terminate=True)
    wait_until(lambda: not held_ids(client.redis))
    assert stock.control.ping([worker.hostname], timeout=GET_S)
    # Key tracking tells of the jobs that nobody rings for.
    assert "jobs of stock producers wait" not in worker.text()


def test_a_gateway_the_exporter_and_the_commands_show_and_serve_the_fleet(
    url: str, worker: WorkerProcess, tmp_path: Path
) -> None:
    with (
        running_gateway(url, tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, timeout=GET_S) as http,
    ):
        answer = http.post("/v1/completions", json=FIELDS | {"model": "toy"})
        assert answer.json()["choices"][0]["text"] == TEXT
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["toy"]
        streamed = http.post("/v1/completions", json=FIELDS | {"model": "toy", "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert ended_batch(http)["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    with running_exporter(url, tmp_path) as exporter:
        wait_until(lambda: scrape(exporter)("llorch_fleet_workers", model_name="toy") == 1)
    status = run("status", "--json", LLORCH_REDIS_URL=url)
    assert [each["hostname"] for each in status.json["workers"]] == [worker.hostname]
    for command in ("top", "doctor", "dead list"):
        assert run(*command.split(), LLORCH_REDIS_URL=url).code == 0
    with FleetClient(url) as seen:
        assert seen.answering({worker.hostname}) == {worker.hostname}


def test_flower_shows_a_worker_and_its_jobs_but_no_queues(
    url: str, client: Client, worker: WorkerProcess, tmp_path: Path
) -> None:
    pytest.importorskip("flower", reason="needs the flower extra")
    with running_flower(url, tmp_path) as flower:
        wait_until(lambda: worker.hostname in flower.get("/api/workers?refresh=1"))
        job = client.submit(**FIELDS)
        job.result(GET_S)
        assert flower.ended(job.id, "SUCCESS")
        with pytest.raises(HTTPError, match="404"):
            flower.get("/broker")


def ended_batch(http: httpx.Client) -> dict[str, Any]:
    request = {"method": "POST", "url": "/v1/completions", "body": FIELDS | {"model": "toy"}}
    lines = "\n".join(json.dumps(request | {"custom_id": name}) for name in ("a", "b"))
    upload = http.post("/v1/files", files={"file": lines.encode()}, data={"purpose": "batch"})
    order = {
        "input_file_id": upload.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = http.post("/v1/batches", json=order).json()

    def ended() -> dict[str, Any] | None:
        found: dict[str, Any] = http.get(f"/v1/batches/{batch['id']}").json()
        return found if found["status"] == "completed" else None

    return wait_until(ended, timeout_s=GET_S, what="the batch to complete")


def test_every_key_lies_in_the_fleets_slot(cluster: RedisCluster, tag: str, client: Client) -> None:
    job = client.submit(**FIELDS)
    assert job.result(GET_S).attempts == 1
    names = cluster.names_of(tag, PLACE)
    assert {keys.MODELS, keys.WORKER_QUEUES, keys.job(job.id), keys.result(job.id)} <= names
    assert keys.NOWHERE not in names
    # Nothing else does anything in this Cluster.
    slot = slot_of(tag)
    for place, master in enumerate(cluster.masters):
        in_slot = master.ask("COUNTKEYSINSLOT", slot)
        assert (in_slot, len(master.names())) == ((len(names),) * 2 if place == PLACE else (0, 0))


def test_fleets_of_two_tags_do_not_see_each_other(
    cluster: RedisCluster, url: str, client: Client, worker: WorkerProcess, tmp_path: Path
) -> None:
    other_tag = cluster.tag_at(1, "other")
    with (
        running_worker(cluster.url(other_tag), tmp_path, name="w2", **QUICK) as other_worker,
        Client(cluster.url(other_tag), model="toy") as other,
    ):
        fleets = (client, worker), (other, other_worker)
        running = [begun(each.submit(prompt="x", max_tokens=4000)) for each, _ in fleets]
        assert [held_ids(each.redis) for each, _ in fleets] == [{job.id} for job in running]
        for (each, mine), job in zip(fleets, running, strict=True):
            assert [card.hostname for card in each.workers()] == [mine.hostname]
            job.cancel()
            with pytest.raises(Cancelled):
                job.result(GET_S)
            jobs = [each.submit(**FIELDS) for _ in range(4)]
            assert {job.result(GET_S).worker for job in jobs} == {mine.hostname}
        assert keys.job(running[1].id) in cluster.names_of(other_tag, 1)


def test_a_dead_workers_job_is_taken_over(url: str, tmp_path: Path, latch: Latch) -> None:
    brief: dict[str, Any] = QUICK | {"model_name": "brief", "lease_s": 1, "sweep_s": 0.5}
    with (
        running_worker(url, tmp_path, name="first", **brief) as first,
        Client(url, model="brief") as client,
    ):
        job = begun(client.submit(prompt=latch.prompt(after=5), max_tokens=20))
        first.process.kill()
        with running_worker(url, tmp_path, name="second", **brief) as second:
            latch.open()
            assert job.result(GET_S).worker == second.hostname
            assert len(token_ids(job.stream(timeout=GET_S))) == 20


def test_while_the_slot_moves_no_script_begins(cluster: RedisCluster) -> None:
    """Otherwise it would fail at the first key that is not at the old master, such as an empty list
    that a job goes back to, with the job in nobody's hands."""
    source, target = cluster.masters[1:]
    tag = cluster.tag_at(1, "half")
    with connect(cluster.url(tag)) as client:
        push(client, "a")
        (claim,) = take(client)
        record = client.hgetall(keys.job("a"))
        with cluster.moving(slot_of(tag), source, target):
            with pytest.raises(NoConnection, match="does not serve these keys now"):
                claims.hand_back(client, claim)
            assert client.hgetall(keys.job("a")) == record
        assert claims.hand_back(client, claim)
        assert [job.job_id for job in take(client)] == ["a"]


def test_while_the_slot_moves_a_fleet_waits_and_then_goes_on(
    cluster: RedisCluster, tmp_path: Path, latch: Latch
) -> None:
    source, target = cluster.masters[1:]
    tag = cluster.tag_at(1, "moved")
    options: dict[str, Any] = QUICK | {"max_sequences": 1}
    with (
        running_worker(cluster.url(tag), tmp_path, **options) as worker,
        Client(cluster.url(tag), model="toy") as client,
    ):
        running = begun(client.submit(prompt=latch.prompt(after=5), max_tokens=500))
        waiting = [client.submit(**FIELDS) for _ in range(3)]
        before = cluster.names_of(tag, 1)
        with cluster.moving(slot_of(tag), source, target):
            with pytest.raises(BrokerUnavailable, match="does not serve these keys now"):
                client.submit(**FIELDS)
            latch.open()
            wait_until(lambda: "will retry" in worker.text(), what="the worker to notice")
        assert len(running.result(GET_S).choices[0].token_ids) == 500
        assert [job.result(GET_S).text for job in waiting] == [TEXT] * 3
        assert client.submit(**FIELDS).result(GET_S).text == TEXT
        assert not cluster.names_of(tag, 2).isdisjoint(before)
        assert worker.process.poll() is None


def test_the_watcher_of_the_queues_follows_a_slot_that_moves_at_once(
    cluster: RedisCluster,
) -> None:
    source, target = cluster.masters[1:]
    tag = cluster.tag_at(1, "watched")
    with connect(cluster.url(tag)) as client, closing(QueueWatcher(client, "toy")) as watcher:
        watcher.start()
        wait_until(lambda: tracks(source), what="the watcher")
        with cluster.moving(slot_of(tag), source, target):
            pass
        wait_until(lambda: tracks(target), what="the watcher at the new master")


def tracks(node: Node) -> bool:
    """Whether a client gets news of keys there."""
    return any("t" in each["flags"] for each in node.client.client_list())


def test_a_redis_that_is_no_cluster_is_refused_with_the_reason(own_server: RedisServer) -> None:
    with (
        Client(own_server.url.replace("redis://", "redis+cluster://"), model="toy") as client,
        pytest.raises(BrokerRefused, match="cluster support disabled"),
    ):
        client.models()


def test_a_master_and_its_replica_change_roles_under_waiting_readers_and_workers(
    cluster: RedisCluster, client: Client, worker: WorkerProcess, latch: Latch
) -> None:
    running = begun(client.submit(prompt=latch.prompt(after=50), max_tokens=500))
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(lambda: token_ids(running.stream(timeout=GET_S)))
        wait_until(lambda: {"blpop", "xread"} <= waiting_in(cluster.masters[PLACE]))
        cluster.fail_over()
        job = wait_until(partial(submitted, client), timeout_s=GET_S, what="a job to be accepted")
        assert len(token_ids(job.stream(timeout=GET_S))) == 2
        latch.open()
        assert len(reading.result(GET_S)) == 500
    assert worker.process.poll() is None


def waiting_in(node: Node) -> set[str]:
    """The commands that wait there."""
    return {each["cmd"] for each in node.client.client_list() if "b" in each["flags"]}


def submitted(client: Client) -> Job | None:
    try:
        return client.submit(**FIELDS)
    except BrokerUnavailable:
        return None


def test_a_replica_takes_the_place_of_a_dead_master_and_no_job_is_lost(
    cluster: RedisCluster, client: Client, worker: WorkerProcess, latch: Latch
) -> None:
    running = [begun(client.submit(prompt=latch.prompt(after=50), max_tokens=500)) for _ in "1234"]
    waiting = [client.submit(**FIELDS) for _ in range(4)]
    master, replica = cluster.masters[PLACE], cluster.replica
    # All that was acknowledged is in the replica.
    assert master.client.info("replication")["connected_slaves"] == 1
    wait_until(lambda: offset(replica.client) >= offset(master.client), what="the replica")
    master.server.kill()
    wait_until(partial(is_master, replica), timeout_s=GET_S, what="the new master")
    latch.open()
    for job in running:
        result = wait_until(partial(ended, job), timeout_s=GET_S, what="a running job's end")
        ids = result.choices[0].token_ids
        assert len(ids) == 500
        assert tuple(token_ids(job.stream(timeout=GET_S))) == ids
    assert [job.result(GET_S).text for job in waiting] == [TEXT] * 4
    assert client.submit(**FIELDS).result(GET_S).worker == worker.hostname
    assert worker.process.poll() is None


def offset(server: redis.Redis) -> int:
    found = server.info("replication")
    return int(found.get("slave_repl_offset", found["master_repl_offset"]))


def ended(job: Job) -> GenerationResult | None:
    """Its result; None while the Cluster has no master for it."""
    try:
        return job.result(GET_S)
    except BrokerUnavailable:
        return None
