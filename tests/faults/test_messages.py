"""What is no job becomes a dead letter with its reason, ends what it can end, and harms nobody."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Failed, InvalidRequest
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.services import RedisServer, WorkerProcess, held_ids, wait_until

GET_S = 30
TOO_LONG = "x" * 300


@pytest.fixture(scope="module")
def client(redis_server: RedisServer) -> Iterator[Client]:
    with Client(redis_server.url) as client:
        yield client


@pytest.fixture(autouse=True)
def _serves_on(toy_worker: WorkerProcess, client: Client) -> Iterator[None]:
    client.redis.delete(keys.DEAD)
    yield
    jobs = [client.submit(prompt="still there?", max_tokens=3) for _ in range(5)]
    for job in jobs:
        assert job.result(GET_S).text == "w0 w1 w2 "
    wait_until(lambda: not held_ids(client.redis), what="every claim to be settled")
    assert toy_worker.process.poll() is None
    assert toy_worker.text().count("Connected to redis") == 1, "it never had to reconnect"


def letters(client: Client, count: int) -> list[dict[str, Any]]:
    """The dead letters, once there are ``count``."""
    wait_until(lambda: client.redis.llen(keys.DEAD) >= count, what="the dead letters")
    found = [json.loads(text) for text in client.redis.lrange(keys.DEAD, 0, -1)]
    assert len(found) == count
    return found


def raw(job_id: str, *, headers: dict[str, str] | None = None, **changes: Any) -> str:
    named = {"id": job_id} | ({"task": TASK_NAME} if headers is None else headers)
    return json.dumps(envelope(GOOD_BODY, headers=named, **changes))


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"no json",
        b'{"headers": {"id": "cut of',
        b"\xff\xfe\x00",
        b"17",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"headers": []}',
        b'{"headers": {"id": 5}}',
        b'{"headers": {"id": ""}}',
        json.dumps({"headers": {"id": TOO_LONG}}).encode(),
        json.dumps({"headers": {"id": {"id": "x"}}}).encode(),
        b'{"headers": {"id": "\xff\xfe"}}',
        b'{"headers": {"id": "\xed\xa0\x80"}}',
        json.dumps(envelope(GOOD_BODY, headers={"task": TASK_NAME}))
        .replace('"correlation_id": "raw"', '"correlation_id": null')
        .encode(),
    ],
    ids=lambda entry: repr(entry[:28]),
)
def test_an_entry_that_names_no_job_is_a_dead_letter(
    client: Client, toy_worker: WorkerProcess, entry: bytes
) -> None:
    told = toy_worker.text().count("refused an entry")
    client.redis.lpush(QUEUE, entry)
    (letter,) = letters(client, 1)
    wait_until(lambda: toy_worker.text().count("refused an entry") == told + 1)
    assert toy_worker.text().count(f"refused an entry of {len(entry)} bytes without a job id")
    assert letter["reason"] == "malformed"
    assert letter["list"] == QUEUE
    assert letter["id"] == ""
    assert letter["attempts"] == 0
    assert letter["at_ms"] > 0
    assert len(letter["message"]) > 0 or not entry


@pytest.mark.parametrize(
    "changes",
    [
        {"properties": {"delivery_tag": "x"}},
        {"properties": None},
        {"properties": {"delivery_tag": 7, "delivery_info": {}}},
        {"body": "not base64!"},
        {"body": base64.b64encode(b"{not json").decode()},
        {"body": None},
        {"body": 5},
        {"body": None, "headers": {}},
        {"body": 5, "headers": {}},
        {"body": base64.b64encode(b"[[], 3, {}]").decode()},
        {"content-type": "application/x-python-serialize"},
        {"content-type": None},
    ],
    ids=str,
)
def test_a_message_that_names_its_job_also_ends_it(
    client: Client, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    job_id = f"unreadable-{request.node.callspec.indices['changes']}"
    client.redis.lpush(QUEUE, raw(job_id, **changes))
    job = client.job(job_id)
    with pytest.raises(InvalidRequest):
        job.result(GET_S)
    (entry,) = job.stream(timeout=GET_S)
    assert isinstance(entry.event, Failed)
    (letter,) = letters(client, 1)
    assert (letter["id"], letter["list"], letter["attempts"]) == (job_id, QUEUE, 1)
    assert letter["reason"]


@pytest.mark.parametrize(
    "headers",
    [
        {"task": 5, "id": "headers-0"},
        {"id": "headers-1"},
        {"task": None, "id": "headers-2"},
        {"task": TASK_NAME, "id": "headers-3", "eta": "the day after tomorrow"},
        {"task": TASK_NAME, "id": "headers-4", "expires": "yesterday"},
    ],
    ids=str,
)
def test_wrong_headers_end_the_job_they_name(client: Client, headers: dict[str, Any]) -> None:
    client.redis.lpush(QUEUE, json.dumps(envelope(GOOD_BODY, headers=headers)))
    with pytest.raises(InvalidRequest):
        client.job(headers["id"]).result(GET_S)
    (letter,) = letters(client, 1)
    assert letter["id"] == headers["id"]


def test_an_unknown_task_is_a_dead_letter_and_fails_for_a_stock_producer(
    client: Client, stock: Celery
) -> None:
    result = stock.send_task("llorch.nonsense", kwargs={"prompt": "x"}, queue=QUEUE)
    with pytest.raises(Exception, match=r"llorch\.nonsense"):
        result.get(timeout=GET_S)
    (letter,) = letters(client, 1)
    assert letter["id"] == result.id
    assert "llorch.nonsense" in letter["reason"]


def test_an_id_whose_record_is_no_record_harms_neither_worker_nor_neighbours(
    client: Client,
) -> None:
    # The key of this id's record is another job's stream.
    first = client.submit(prompt="x", max_tokens=2)
    first.result(GET_S)
    good = [raw(f"good-{number}") for number in range(3)]
    client.redis.lpush(QUEUE, good[0], raw(f"{first.id}:events"), *good[1:])
    for number in range(3):
        assert client.job(f"good-{number}").result(GET_S).attempts == 1
    (letter,) = letters(client, 1)
    assert letter["reason"] == "malformed"


def test_messages_with_one_delivery_tag_all_run_and_free_their_slots(client: Client) -> None:
    # raw() gives all the same tag; more of them than the worker has slots.
    client.redis.lpush(QUEUE, *(raw(f"same-tag-{number}") for number in range(9)))
    for number in range(9):
        assert client.job(f"same-tag-{number}").result(GET_S).text == "w0 "


def test_ids_of_any_script_run(client: Client) -> None:
    for job_id in ("Zürich", "東京", "🦙", 'quote"%0', "space and\ttab"):
        client.redis.lpush(QUEUE, raw(job_id))
        assert client.job(job_id).result(GET_S).text == "w0 "


def test_dead_letters_are_counted_where_the_operator_looks(
    client: Client, stock: Celery, toy_worker: WorkerProcess
) -> None:
    client.redis.lpush(QUEUE, b"no json", b"{}")
    letters(client, 2)
    stats = stock.control.inspect([toy_worker.hostname], timeout=5).stats()
    assert stats[toy_worker.hostname]["dead_letters"] == 2
