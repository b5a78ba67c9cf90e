"""What users write, and what is written for them, is in no log, no event and no inspection."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Cancelled, InvalidRequest, LlorchError
from tests.disguises import assert_hidden
from tests.monitor import Monitor
from tests.services import RedisServer, WorkerProcess, running_worker, wait_until
from tests.telemetry.collector import Collector, running_collector

QUEUE = "llorch.toy"
SECRET = "zqxPROMPTxqz"
GENERATED = "w0 w1 w2 w3 w4 w5 w6"
GET_S = 60


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[WorkerProcess]:
    """A worker that logs and traces all it can."""
    folder: Path = tmp_path_factory.mktemp("debug")
    options: dict[str, Any] = {"model_name": "toy", "max_sequences": 2, "TOY_STEP_MS": 5}
    options |= collector.environment()
    with running_worker(redis_server.url, folder, loglevel="DEBUG", **options) as worker:
        yield worker


@pytest.fixture(scope="module")
def monitor(stock: Celery, worker: WorkerProcess, collector: Collector) -> Iterator[Monitor]:
    with Monitor(stock) as monitor:
        yield monitor
    assert_hidden(b"".join(collector.bodies), (SECRET, GENERATED))


def assert_nothing_shows(worker: WorkerProcess, monitor: Monitor) -> None:
    shown = worker.text() + json.dumps(monitor.events, default=repr)
    assert_hidden(shown, (SECRET, GENERATED))


def test_a_job_that_succeeds_shows_nothing(
    stock: Celery, worker: WorkerProcess, monitor: Monitor, collector: Collector
) -> None:
    kwargs = {
        "prompt": f"{SECRET} in a prompt",
        "max_tokens": 20,
        "stop": [SECRET],
        "metadata": {"note": SECRET},
    }
    sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE)
    assert sent.get(timeout=GET_S)["text"].startswith(GENERATED)
    for kind in ("task-received", "task-started", "task-succeeded"):
        wait_until(lambda kind=kind: monitor.saw(kind, sent.id))
    collector.attempt(sent.id)
    received = next(e for e in monitor.events if e["type"] == "task-received")
    assert "a string of 24 characters" in received["kwargs"]
    assert_nothing_shows(worker, monitor)


@pytest.mark.parametrize(
    "message",
    [
        {"args": [SECRET]},
        {"kwargs": {"prompt": SECRET, "unknown": SECRET}},
        {"kwargs": {"prompt": SECRET, "max_tokens": SECRET}},
        {"kwargs": {"prompt": f"raise ValueError {SECRET}"}},
        {"kwargs": {"prompt": f"raise MemoryError {SECRET}"}},
        {"kwargs": {"prompt": f"raise SystemExit {SECRET}"}},
        {"kwargs": {"messages": [{"role": SECRET, "content": SECRET}]}},
    ],
    ids=str,
)
def test_a_job_that_fails_shows_nothing(
    stock: Celery, worker: WorkerProcess, monitor: Monitor, message: dict[str, Any]
) -> None:
    sent = stock.send_task(TASK_NAME, queue=QUEUE, **message)
    with pytest.raises(LlorchError):
        sent.get(timeout=GET_S)
    wait_until(lambda: monitor.saw("task-failed", sent.id))
    assert_nothing_shows(worker, monitor)


def test_celery_s_own_tasks_over_prompts_show_nothing(
    stock: Celery, worker: WorkerProcess, monitor: Monitor
) -> None:
    over = [stock.signature(TASK_NAME), [SECRET, SECRET]]
    sent = stock.send_task("celery.map", args=over, queue=QUEUE)
    with pytest.raises(InvalidRequest, match="a group of jobs"):
        sent.get(timeout=GET_S)
    wait_until(lambda: monitor.saw("task-failed", sent.id))
    assert_nothing_shows(worker, monitor)


def test_a_message_that_is_not_a_job_shows_nothing(
    stock: Celery, client: Client, worker: WorkerProcess, monitor: Monitor
) -> None:
    lost = stock.send_task("llorch.other", args=[SECRET], kwargs={"p": SECRET}, queue=QUEUE)
    with pytest.raises(Exception, match=r"llorch\.other"):
        lost.get(timeout=GET_S)
    for entry in (SECRET, json.dumps({"prompt": SECRET}), json.dumps([SECRET])):
        client.redis.lpush(QUEUE, entry)
    for body in (f"{{not json {SECRET}", json.dumps([[SECRET], SECRET]), json.dumps(SECRET)):
        for headers in ({}, {"task": TASK_NAME}, {"task": TASK_NAME, "id": "torn"}):
            message = {
                "body": base64.b64encode(body.encode()).decode(),
                "content-type": "application/json",
                "content-encoding": "utf-8",
                "headers": headers | {"kwargsrepr": SECRET, "argsrepr": SECRET},
                "properties": {
                    "delivery_tag": f"torn-{len(headers)}",
                    "delivery_info": {"exchange": "", "routing_key": QUEUE},
                    "body_encoding": "base64",
                },
            }
            client.redis.lpush(QUEUE, json.dumps(message))
    assert client.submit(prompt="after all this", max_tokens=1).result(GET_S)
    assert_nothing_shows(worker, monitor)


def test_inspection_of_running_and_scheduled_jobs_shows_nothing(
    stock: Celery, client: Client, worker: WorkerProcess, monitor: Monitor
) -> None:
    running = client.submit(prompt=SECRET, max_tokens=4000)
    later = stock.send_task(TASK_NAME, kwargs={"prompt": SECRET}, queue=QUEUE, countdown=600)
    next(iter(running.stream(timeout=GET_S)))
    wait_until(lambda: client.job(later.id).status().state == "queued")
    inspect = stock.control.inspect(timeout=GET_S, destination=[worker.hostname])
    shown = [
        inspect.active(),
        inspect.active(safe=True),
        inspect.reserved(),
        inspect.scheduled(),
        inspect.query_task(running.id, later.id),
    ]
    text = json.dumps(shown)
    assert running.id in text
    assert f"a string of {len(SECRET)} characters" in text
    assert SECRET not in text
    assert client.job(later.id).cancel()
    stock.control.revoke(running.id, terminate=True)
    with pytest.raises(Cancelled):
        running.result(GET_S)
    wait_until(lambda: monitor.saw("task-revoked", running.id))
    assert_nothing_shows(worker, monitor)
