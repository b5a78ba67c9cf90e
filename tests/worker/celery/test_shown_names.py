"""Names that a producer chooses are cut and escaped in logs, events and inspections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.monitor import Monitor
from tests.services import WorkerProcess, begun, wait_until
from tests.worker.celery.remote import told

EVIL = "\x1b[2J\n[2026-11-22 00:00:00: CRITICAL] forged \u202e" + "y" * 5_000
LONGEST = 81
"""Longer runs of EVIL's last character do not show."""
GET_S = 60


@pytest.fixture(scope="module")
def monitor(stock: Celery, toy_worker: WorkerProcess) -> Iterator[Monitor]:
    with Monitor(stock) as monitor:
        yield monitor


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON document."""
    match value:
        case str():
            yield value
        case dict():
            for pair in value.items():
                yield from strings(pair)
        case list() | tuple():
            for each in value:
                yield from strings(each)


def assert_harmless(worker: WorkerProcess, monitor: Monitor, *inspected: Any) -> None:
    log = worker.text()
    assert "\x1b" not in log
    assert "\u202e" not in log
    assert "\n[2026-11-22 00:00:00: CRITICAL]" not in log
    assert "y" * LONGEST not in log
    shown = [event for event in list(monitor.events) if event["type"] != "task-sent"]
    for text in strings([shown, inspected]):
        assert "\x1b" not in text
        assert "y" * LONGEST not in text


def send(client: Client, kwargs: dict[str, Any], **headers: Any) -> str:
    """Pushes a message with these headers, as any program may; returns its id."""
    job_id = str(headers.setdefault("id", f"evil-{len(kwargs)}-{sorted(headers)}"))
    message = envelope([[], kwargs, {}], headers={"task": TASK_NAME} | headers)
    message["properties"]["delivery_info"] = {"exchange": EVIL, "routing_key": EVIL}
    message["properties"] |= {"priority": EVIL, "reply_to": EVIL}
    client.redis.lpush(QUEUE, json.dumps(message))
    return job_id


NAMES = ("shadow", "root_id", "parent_id", "origin", "retries", "group", "argsrepr", "lang")


def test_a_running_jobs_names_are_shown_in_one_short_line(
    client: Client, stock: Celery, toy_worker: WorkerProcess, monitor: Monitor
) -> None:
    job_id = send(client, {"prompt": "x", "max_tokens": 4000}, **dict.fromkeys(NAMES, EVIL))
    job = begun(client.job(job_id))
    inspected = [
        told(stock, toy_worker, "active"),
        told(stock, toy_worker, "query_task", ids=[job_id]),
    ]
    assert job_id in json.dumps(inspected)
    job.cancel()
    wait_until(lambda: monitor.saw("task-revoked", job_id))
    assert_harmless(toy_worker, monitor, inspected)


@pytest.mark.parametrize(
    ("kwargs", "headers"),
    [
        ({"prompt": "x", EVIL: 1}, {}),
        ({"prompt": "x"} | {f"{EVIL}{number}": 1 for number in range(200)}, {}),
        ({"prompt": "x", "model": EVIL[:200]}, {}),
        ({"prompt": "x"}, {"task": EVIL}),
        ({"prompt": "x", "max_tokens": 1}, {"id": EVIL[:50]}),
        ({"prompt": "x", "max_tokens": 1}, {"shadow": [EVIL], "root_id": {EVIL: EVIL}}),
    ],
    ids=["field", "fields", "model", "task", "id", "objects"],
)
def test_an_ended_jobs_names_are_shown_in_one_short_line(
    client: Client,
    toy_worker: WorkerProcess,
    monitor: Monitor,
    kwargs: dict[str, Any],
    headers: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    headers = {"id": f"evil {request.node.callspec.id}"} | headers
    job_id = send(client, kwargs, **headers)
    ends = ("task-failed", "task-succeeded")
    wait_until(lambda: any(monitor.saw(end, job_id) for end in ends))
    monitor.events[:] = [event for event in monitor.events if event.get("uuid") != EVIL[:50]]
    assert_harmless(toy_worker, monitor)


def test_protocol_1_names_are_shown_in_one_short_line(
    client: Client, toy_worker: WorkerProcess, monitor: Monitor
) -> None:
    body = {"task": TASK_NAME, "args": [], "kwargs": GOOD_BODY[1], "retries": EVIL, "root_id": EVIL}
    for job_id in ("evil one", EVIL):
        message = envelope(body | {"id": job_id}, headers={})
        message["properties"]["correlation_id"] = job_id[:40]
        client.redis.lpush(QUEUE, json.dumps(message))
    wait_until(lambda: monitor.saw("task-succeeded", "evil one"))
    wait_until(lambda: "its id is not a string of 1 to 255 characters" in toy_worker.text())
    assert_harmless(toy_worker, monitor)
