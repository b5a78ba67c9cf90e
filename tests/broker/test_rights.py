"""On every server that is installed, the rights in ``deploy/redis/users.conf`` are enough for all
that their users do. ``ACL LOG`` tells what they lack, even where a program goes on without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from celery import Celery, chain, chord
from redis.exceptions import NoPermissionError

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs import dead_letters
from llorch_worker.broker.queues import place_of
from llorch_worker.broker.standing_in import release_late
from llorch_worker.broker.waiting import older_version
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, AttemptsExhausted, Cancelled, QueueFull
from tests.broker.steps import announce, note_seen
from tests.cli.command import run
from tests.flowers import running_flower
from tests.gateways import running_gateway
from tests.latch import Latch
from tests.messages import GOOD_BODY, envelope
from tests.monitor import Monitor
from tests.services import (
    LOCALHOST,
    REPOSITORY,
    RedisServer,
    WorkerProcess,
    assert_streamed_read_and_cancelled,
    begun,
    own_redis,
    redis_binaries,
    running_worker,
    stock_app,
    token_ids,
    wait_until,
)
from tests.store import held_ids, waiting_ids
from tests.telemetry.exporters import running_exporter
from tests.telemetry.scraping import scrape

USERS = REPOSITORY / "deploy" / "redis" / "users.conf"
GET_S = 60
QUEUE = "llorch.toy"
FIELDS = {"prompt": "x", "max_tokens": 2}
TEXT = "w0 w1 "


@pytest.fixture(scope="module", params=redis_binaries(), ids=str)
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with own_redis(binary=request.param, options=("--include", str(USERS))) as server:
        yield server


@pytest.fixture
def admin(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """The default user."""
    with connect(redis_server.url) as client:
        yield client


def refused(admin: redis.Redis) -> set[tuple[str, str, str]]:
    """User, reason and object of what was refused since the last call."""
    entries = admin.acl_log()
    admin.acl_log_reset()
    found = {(entry["username"], entry["reason"], entry["object"]) for entry in entries}
    # Redis 6 has no CLIENT SETINFO, with which redis-py tells its version, and logs no subcommand.
    return {entry for entry in found if entry[2] != "client"}


@pytest.fixture(autouse=True)
def _nothing_else_is_refused(admin: redis.Redis) -> Iterator[None]:
    """A test that expects refusals takes them out of the log itself."""
    yield
    assert refused(admin) == set()


def url_of(server: RedisServer, user: str) -> str:
    return f"redis://{user}:change-me@{LOCALHOST}:{server.port}/0"


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    url = url_of(redis_server, "llorch-worker")
    folder = tmp_path_factory.mktemp("rights")
    options = {"model_name": "toy", "max_sequences": 4, "TOY_STEP_MS": 2}
    with running_worker(url, folder, watched_at=redis_server.url, **options) as process:
        yield process


@pytest.fixture
def producer(redis_server: RedisServer, worker: WorkerProcess) -> Iterator[Client]:
    with Client(url_of(redis_server, "llorch-producer"), model="toy") as client:
        yield client


@pytest.fixture
def stock(redis_server: RedisServer, worker: WorkerProcess) -> Iterator[Celery]:
    with stock_app(url_of(redis_server, "celery-producer")) as app:
        yield app


# A worker -----------------------------------------------------------------------------------------


def test_a_job_of_killed_workers_is_taken_over_then_a_dead_letter_then_retried(
    redis_server: RedisServer, admin: redis.Redis, tmp_path: Path, latch: Latch
) -> None:
    options: dict[str, Any] = {
        "watched_at": redis_server.url, "model_name": "brief", "TOY_STEP_MS": 1,
        "lease_s": 1, "sweep_s": 0.5, "max_deaths": 2,
    }  # fmt: skip
    url = url_of(redis_server, "llorch-worker")
    operator = {"LLORCH_REDIS_URL": url_of(redis_server, "llorch-gateway")}
    with (
        running_worker(url, tmp_path, name="first", **options) as first,
        Client(url_of(redis_server, "llorch-producer"), model="brief") as client,
    ):
        job = begun(client.submit(prompt=latch.prompt(after=5), max_tokens=20))
        first.process.kill()
        with running_worker(url, tmp_path, name="second", **options) as second:
            holder = ("second@test", "claimed")
            wait_until(
                lambda: tuple(admin.hmget(keys.job(job.id), "worker", "state")) == holder,
                what="the takeover",
            )
            second.process.kill()
        with running_worker(url, tmp_path, name="third", **options):
            with pytest.raises(AttemptsExhausted):
                job.result(GET_S)
            latch.open()
            assert run("dead", "retry", job.id, **operator).code == 0
            assert job.result(GET_S).worker == "third@test"
            assert len(token_ids(job.stream(timeout=GET_S))) == 20
    wait_until(lambda: not held_ids(admin))
    assert dead_letters.count(admin) == 0


def test_a_worker_answers_control_commands_and_sends_events(
    redis_server: RedisServer, producer: Client, worker: WorkerProcess, admin: redis.Redis
) -> None:
    with (
        Celery("flower", broker=url_of(redis_server, "flower"), set_as_current=False) as app,
        Monitor(app) as monitor,
    ):
        wait_until(lambda: any(event["type"] == "worker-heartbeat" for event in [*monitor.events]))
        assert app.control.ping([worker.hostname], timeout=GET_S)
        done = producer.submit(**FIELDS)
        done.result(GET_S)
        wait_until(lambda: monitor.saw("task-succeeded", done.id))
        endless = begun(producer.submit(prompt="x", max_tokens=4000))
        app.control.revoke(endless.id, terminate=True)
        with pytest.raises(Cancelled):
            endless.result(GET_S)
        wait_until(lambda: monitor.saw("task-revoked", endless.id))


@pytest.mark.parametrize("left", [("+client|id",), ()], ids=["an id", "no CLIENT"])
def test_a_worker_without_the_rights_that_only_save_time_ends_every_job(
    redis_server: RedisServer, admin: redis.Redis, tmp_path: Path, left: tuple[str, ...]
) -> None:
    rule = next(line for line in USERS.read_text().splitlines() if "user llorch-worker " in line)
    granted = [part for part in rule.split()[2:] if not part.startswith("+client|")]
    admin.execute_command("ACL", "SETUSER", "slow", "reset", *granted, "-client", *left)
    options: dict[str, Any] = {
        "watched_at": redis_server.url, "name": "slow", "model_name": "slow", "max_sequences": 2,
    }  # fmt: skip
    with (
        running_worker(url_of(redis_server, "slow"), tmp_path, **options) as worker,
        Client(redis_server.url, model="slow") as client,
        Celery("plain", broker=redis_server.url, set_as_current=False) as app,
    ):
        # Twice more than it has room for: it waits for a wake-up, is full, and waits again.
        for _ in range(2):
            ours = [client.submit(**FIELDS) for _ in range(4)]
            stock = [
                client.job(app.send_task(TASK_NAME, kwargs=FIELDS, queue="llorch.slow").id)
                for _ in range(2)
            ]
            assert [job.result(GET_S).text for job in [*ours, *stock]] == [TEXT] * 6
        wait_until(lambda: "jobs of stock producers wait up to a second" in worker.text())
    asked = {f"client|{name}" for name in ("id", "tracking", "unblock", "setinfo")}
    assert {refusal for _, _, refusal in refused(admin)} <= asked


def test_a_worker_takes_over_what_an_older_version_left(
    redis_server: RedisServer, admin: redis.Redis
) -> None:
    message = json.dumps(envelope(GOOD_BODY, headers={"id": "left"}))
    for name in (
        "llorch.old:suspects",
        "llorch:tenants:llorch.old\x06\x16t/acme",
        "llorch.old@w.h",
    ):
        admin.lpush(name, message)
    admin.hset("llorch:tenants:llorch.old\x06\x16t", "acme", 1)
    admin.zadd(keys.live("old"), {"llorch.old@w.h": 1})
    admin.hset(keys.job("due"), mapping={"state": "scheduled", "list": QUEUE, "message": message})
    admin.zadd("llorch.old:scheduled", {"due": 1})
    with connect(url_of(redis_server, "llorch-worker")) as client:
        assert older_version.living(client, "old") is None
        assert older_version.move(client, "old") == 4
    assert admin.llen("llorch.old") == 3


# Producers ----------------------------------------------------------------------------------------


def test_a_job_of_our_client_is_streamed_read_and_cancelled(
    producer: Client, admin: redis.Redis
) -> None:
    assert_streamed_read_and_cancelled(producer, admin, tokens=20, within_s=GET_S, priority="low")


@pytest.mark.parametrize("user", ["llorch-producer", "llorch-gateway", "llorch-worker"])
def test_a_large_job_is_sent_and_ends(
    redis_server: RedisServer, worker: WorkerProcess, user: str
) -> None:
    with Client(url_of(redis_server, user), model="toy") as client:
        job = client.submit(prompt="x" * keys.APART_BYTES, max_tokens=1)
        assert job.result(GET_S).text == "w0 "


def test_jobs_of_tenants_wait_and_end(producer: Client, worker: WorkerProcess) -> None:
    with worker.paused():
        jobs = [producer.submit(**FIELDS, tenant=tenant) for tenant in ("a", "a", "a", "b")]
        assert jobs[3].status().position is not None
        assert jobs[1].cancel()
    del jobs[1]
    assert [job.result(GET_S).text for job in jobs] == [TEXT] * 3


def test_a_job_is_placed(producer: Client, admin: redis.Redis, worker: WorkerProcess) -> None:
    """With workers that are gone, so the second job meets the wake-up of the first."""
    load, gone = keys.load("llorch.toy"), place_of("toy", "gone@test")
    note_seen(admin, gone)
    jobs = []
    for _ in range(2):
        admin.delete(load)
        admin.zadd(load, {gone: 0})
        jobs.append(producer.submit(prompt="x", max_tokens=2, affinity_key="k"))
    assert admin.zscore(load, gone) is None
    assert {job.result(GET_S).worker for job in jobs} == {worker.hostname}


def test_jobs_wait_in_all_ways_are_found_again_and_end(
    redis_server: RedisServer, worker: WorkerProcess, admin: redis.Redis
) -> None:
    """Of a model whose workers are away, so that no other user does anything for the producer."""
    announce(admin, limit=3, name="away")
    places = [place_of("away", name) for name in ("a@test", "b@test")]
    note_seen(admin, *places)
    url = url_of(redis_server, "llorch-producer")
    with Client(url, model="away") as producer:
        fields = {"tenant": "t", "priority": "high", "affinity_key": "k", "deadline_s": 60}
        job = producer.submit(prompt="x", idempotency_key="once", **fields)
        assert producer.submit(prompt="x", idempotency_key="once", **fields).id == job.id
        status = job.status()
        assert status.position is not None
        assert status.position.place == 1
        # One of a stock producer, which nobody has moved.
        admin.lpush("llorch.away", json.dumps(envelope(GOOD_BODY, headers={"id": "stock"})))
        assert not producer.job("stock").cancel(), "it is unknown yet"
        producer.submit(prompt_token_ids=[1, 2], n=2)
        with pytest.raises(QueueFull):
            producer.submit(prompt="x")
        assert job.cancel()
        assert job.status().state == "cancelled"


def test_a_stock_producer_sends_and_reads_and_revokes_and_inspects(
    stock: Celery, worker: WorkerProcess, admin: redis.Redis
) -> None:
    sent = [
        stock.send_task(TASK_NAME, kwargs=FIELDS, queue=QUEUE, priority=place)
        for place in (0, 3, 9)
    ]
    later = stock.send_task(TASK_NAME, kwargs=FIELDS, queue=QUEUE, countdown=1)
    assert [job.get(timeout=GET_S)["text"] for job in [*sent, later]] == [TEXT] * 4
    sent[0].forget()
    fields = {"prompt": "x", "max_tokens": 4000}
    endless = stock.send_task(TASK_NAME, kwargs=fields, queue=QUEUE)
    wait_until(lambda: held_ids(admin) == {endless.id})
    endless.revoke(terminate=True)
    wait_until(lambda: not held_ids(admin))
    queues = stock.control.inspect([worker.hostname], timeout=GET_S).active_queues()
    assert queues is not None
    assert QUEUE in [queue["name"] for queue in queues[worker.hostname]]


def test_a_stock_producers_chains_and_chords_run_to_their_ends(
    stock: Celery, worker: WorkerProcess, admin: redis.Redis
) -> None:
    job = stock.signature(TASK_NAME, kwargs=FIELDS, queue=QUEUE, immutable=True)
    chained = chain(job, job.clone(), app=stock).apply_async()
    assert chained.get(timeout=GET_S)["text"] == TEXT
    chorded = chord([job, job.clone()], job.clone(), app=stock).apply_async()
    assert chorded.get(timeout=GET_S)["text"] == TEXT
    # What follows may be a task of the producer's own application, which has no worker here.
    other = stock.signature("other.text")
    chain(job, other, app=stock).apply_async()
    wait_until(lambda: admin.rpop("celery"), what="the chain's next task")
    chord([job, job.clone()], other, app=stock).apply_async()
    wait_until(lambda: admin.rpop("celery"), what="the chord's body")


# Gateways and those who watch ---------------------------------------------------------------------


def test_a_gateway_serves_jobs_and_batches(
    redis_server: RedisServer, worker: WorkerProcess, tmp_path: Path
) -> None:
    with (
        running_gateway(url_of(redis_server, "llorch-gateway"), tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, timeout=GET_S) as http,
    ):
        body = {"model": "toy", **FIELDS}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["choices"][0]["text"] == TEXT
        streamed = http.post("/v1/completions", json=body | {"stream": True}).raise_for_status()
        assert streamed.text.rstrip().endswith("[DONE]")
        assert http.get("/v1/models").raise_for_status().json()["data"]
        job = http.post("/v1/jobs", json=body | {"max_tokens": 4000}).raise_for_status().json()
        http.delete(f"/v1/jobs/{job['id']}").raise_for_status()
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        files = {"file": ("in.jsonl", json.dumps(line))}
        file = http.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status()
        batch = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch_id = http.post("/v1/batches", json=batch).raise_for_status().json()["id"]
        wait_until(lambda: http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")


def test_an_operator_sees_the_fleet_and_drops_a_dead_letter(
    redis_server: RedisServer, worker: WorkerProcess, admin: redis.Redis, tmp_path: Path
) -> None:
    admin.lpush(QUEUE, "no message")
    wait_until(lambda: dead_letters.count(admin) == 1, what="the dead letter")
    url = url_of(redis_server, "llorch-gateway")
    with running_exporter(url, tmp_path) as exporter:
        wait_until(lambda: scrape(exporter)("llorch_fleet_workers", model_name="toy") == 1)
        assert scrape(exporter)("llorch_fleet_dead_letters") == 1
    with worker.paused():
        admin.lpush(QUEUE, json.dumps(envelope(GOOD_BODY, headers={"id": "purged"})))
        purged = run("purge", QUEUE, "--yes", "--json", LLORCH_REDIS_URL=url)
        assert purged.json["deleted"] == 1
    status = run("status", "--json", LLORCH_REDIS_URL=url)
    assert status.json["dead_letters"] == 1
    assert run("top", LLORCH_REDIS_URL=url).code == 0
    assert run("doctor", LLORCH_REDIS_URL=url).code == 0
    assert run("dead", "drop", "--all", LLORCH_REDIS_URL=url).code == 0
    assert dead_letters.count(admin) == 0


def test_a_gateway_lets_due_jobs_of_a_model_without_workers_wait(
    redis_server: RedisServer, admin: redis.Redis
) -> None:
    announce(admin, name="absent")
    admin.hset(keys.job("due"), mapping={"state": "scheduled", "list": "llorch.absent"})
    admin.zadd(keys.scheduled("absent"), {"due": 1})
    admin.lpush("llorch.absent", json.dumps(envelope(GOOD_BODY, headers={"id": "stock"})))
    with connect(url_of(redis_server, "llorch-gateway")) as client:
        release_late(client)
    assert set(waiting_ids(admin, "absent")) == {"due", "stock"}


def test_flower_shows_a_worker_and_its_jobs(
    redis_server: RedisServer, producer: Client, worker: WorkerProcess, tmp_path: Path
) -> None:
    pytest.importorskip("flower", reason="needs the flower extra")
    with running_flower(url_of(redis_server, "flower"), tmp_path) as flower:
        wait_until(lambda: worker.hostname in flower.get("/api/workers?refresh=1"))
        assert "Sequences" in flower.get(f"/worker/{worker.hostname}")
        assert QUEUE in flower.get("/broker")
        job = producer.submit(**FIELDS)
        job.result(GET_S)
        assert flower.ended(job.id, "SUCCESS")


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("llorch-worker", ("CONFIG", "GET", "*")),
        ("llorch-worker", ("GET", "another:key")),
        ("llorch-producer", ("LRANGE", keys.DEAD, 0, -1)),
        ("llorch-producer", ("FLUSHALL",)),
        ("celery-producer", ("LRANGE", QUEUE, 0, -1)),
        ("celery-producer", ("HGETALL", keys.job("any"))),
        ("llorch-gateway", ("KEYS", "*")),
        ("flower", ("GET", keys.result("any"))),
        ("flower", ("XRANGE", keys.events("any"), "-", "+")),
    ],
)
def test_what_a_user_does_not_need_is_refused(
    redis_server: RedisServer, admin: redis.Redis, user: str, command: tuple[Any, ...]
) -> None:
    with connect(url_of(redis_server, user)) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)
    assert {name for name, _, _ in refused(admin)} == {user}
