"""Messages of Celery's first protocol, as clients in other languages push them."""

from __future__ import annotations

import base64
import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, InvalidRequest
from tests.messages import QUEUE
from tests.services import WorkerProcess, wait_until
from tests.store import stored_result

GET_S = 60
FIELDS = {"prompt": "x", "max_tokens": 2}


def encoded(task: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(task).encode()).decode()


def of_gocelery(task: dict[str, Any]) -> dict[str, Any]:
    """No headers at all, and a correlation id of its own."""
    return {
        "body": encoded(
            {"args": [], "kwargs": None, "retries": 0, "eta": None, "expires": None} | task
        ),
        "content-type": "application/json",
        "properties": {
            "body_encoding": "base64",
            "correlation_id": str(uuid.uuid4()),
            "reply_to": str(uuid.uuid4()),
            "delivery_info": {"priority": 0, "routing_key": "celery", "exchange": "celery"},
            "delivery_mode": 2,
            "delivery_tag": str(uuid.uuid4()),
        },
        "content-encoding": "utf-8",
    }


def of_celery_php(task: dict[str, Any]) -> dict[str, Any]:
    """Empty headers, no correlation id, and an encoding that is none of text."""
    return {
        "body": encoded({"args": [], "kwargs": {}} | task),
        "headers": {},
        "content-type": "application/json",
        "content-encoding": "binary",
        "properties": {
            "body_encoding": "base64",
            "reply_to": task["id"],
            "delivery_info": {"priority": 0, "routing_key": QUEUE, "exchange": QUEUE},
            "delivery_mode": 2,
            "delivery_tag": task["id"],
        },
    }


def of_celery_node(task: dict[str, Any]) -> dict[str, Any]:
    """The version before protocol 2: a body that is not encoded, as kombu also reads it."""
    return {
        "body": json.dumps({"args": [], "kwargs": {}} | task),
        "headers": {},
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "properties": {
            "correlation_id": task["id"],
            "delivery_info": {"exchange": QUEUE, "routing_key": QUEUE},
            "delivery_mode": 2,
            "delivery_tag": str(uuid.uuid4()),
        },
    }


WRITERS = [of_gocelery, of_celery_php, of_celery_node]


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__)
def push(request: pytest.FixtureRequest, client: Client, toy_worker: WorkerProcess) -> Any:
    """Pushes a task with these parts as one of the clients does; returns its id."""

    def pushed(**parts: Any) -> str:
        task = {"id": str(uuid.uuid4()), "task": TASK_NAME, "kwargs": FIELDS} | parts
        client.redis.lpush(QUEUE, json.dumps(request.param(task)))
        return str(task["id"])

    return pushed


def test_the_id_of_the_body_names_the_job(push: Any, client: Client) -> None:
    job_id = push(id=f"Zürich {uuid.uuid4()}", kwargs=FIELDS | {"prompt": "東京 🦙"}, retries=1)
    assert client.job(job_id).result(GET_S).text == "w0 w1 "
    assert json.loads(str(stored_result(client.redis, job_id)))["task_id"] == job_id


def test_a_bad_request_is_answered(push: Any, client: Client) -> None:
    for parts in ({"kwargs": {"prompt": 5}}, {"kwargs": None}, {"args": ["x"], "kwargs": {}}):
        with pytest.raises(InvalidRequest):
            client.job(push(**parts)).result(GET_S)


def test_an_expired_job_is_revoked(push: Any, client: Client) -> None:
    job_id = push(expires=(datetime.now(UTC) - timedelta(seconds=9)).isoformat())
    wait_until(lambda: client.job(job_id).status().ended)
    assert client.job(job_id).status().state == "cancelled"


def test_a_job_with_an_eta_waits_in_redis_and_then_runs(push: Any, client: Client) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    job_id = push(eta=due.isoformat(), expires=(due + timedelta(hours=1)).isoformat())
    wait_until(lambda: client.redis.zscore(keys.scheduled("toy"), job_id) is not None)
    assert client.redis.zscore(keys.scheduled("toy"), job_id) == int(due.timestamp() * 1e3)
    client.redis.zadd(keys.scheduled("toy"), {job_id: 1})
    assert client.job(job_id).result(GET_S).text == "w0 w1 "
