"""An invalid message becomes a dead letter with its reason, and ends the job that it names."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from kombu.compression import encoders

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Failed, InvalidRequest
from tests.malformed import malformed
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.services import WorkerProcess, wait_until
from tests.store import (
    clear_letters,
    follow_ups_in,
    held_ids,
    jobs_that_wait,
    letters_in,
    stored_result,
)

GET_S = 60
TOO_LONG = "x" * 70_000


@pytest.fixture(autouse=True)
def _serves_on(toy_worker: WorkerProcess, client: Client) -> Iterator[None]:
    clear_letters(client.redis)
    yield
    jobs = [client.submit(prompt="still there?", max_tokens=3) for _ in range(5)]
    for job in jobs:
        assert job.result(GET_S).text == "w0 w1 w2 "
    wait_until(lambda: not held_ids(client.redis), what="every claim to be settled")
    assert toy_worker.process.poll() is None
    assert toy_worker.text().count("Connected to redis") == 1, "it never reconnected"


def letters(client: Client, count: int) -> list[dict[str, Any]]:
    """The dead letters, once there are ``count``."""
    wait_until(lambda: len(letters_in(client.redis)) >= count, what="the dead letters")
    found = [json.loads(text) for text in letters_in(client.redis)]
    assert len(found) == count
    return found


def raw(job_id: str, *, headers: Mapping[str, Any] | None = None, **changes: Any) -> str:
    named = {"id": job_id} | ({"task": TASK_NAME} if headers is None else dict(headers))
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
        b'{"headers": "x"}',
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
def test_an_entry_that_names_no_job_becomes_a_dead_letter(
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


NO_BODY = "its body is not [args, kwargs, options]"


@pytest.mark.parametrize(
    ("headers", "body", "reason"),
    [
        ({}, GOOD_BODY, "it is not a task message"),
        ([], GOOD_BODY, "it is not a task message"),
        ({"task": ["x"], "id": "list"}, GOOD_BODY, "its task header is not a string"),
        ({}, {"task": TASK_NAME, "id": "x", "kwargs": 3}, NO_BODY),
    ],
    ids=range(4),
)
def test_a_message_that_is_not_a_task_becomes_a_dead_letter_with_the_reason(
    client: Client, headers: Any, body: Any, reason: str, request: pytest.FixtureRequest
) -> None:
    message = envelope(body, headers=headers)
    message["properties"]["correlation_id"] = f"no-task-{request.node.callspec.indices['reason']}"
    client.redis.lpush(QUEUE, json.dumps(message))
    (letter,) = letters(client, 1)
    assert letter["reason"] == reason


def test_a_task_message_without_an_id_runs_under_its_correlation_id(client: Client) -> None:
    client.redis.lpush(QUEUE, json.dumps(envelope(GOOD_BODY, headers={"task": TASK_NAME})))
    assert client.job("raw").result(GET_S).id == "raw"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"properties": {"delivery_tag": "x"}}, ""),
        ({"properties": None}, ""),
        ({"properties": {"delivery_tag": 7, "delivery_info": {}}}, ""),
        ({"body": "not base64!"}, ""),
        ({"body": base64.b64encode(b"{not json").decode()}, ""),
        ({"body": base64.b64encode(b"\xff\xff").decode()}, "its body is not UTF-8"),
        ({"body": base64.b64encode(b"[" * 50_000).decode()}, "its body nests too deep"),
        (
            {"body": base64.b64encode(b"[" + b"9" * 5_000 + b"]").decode()},
            "its body has an integer of too many digits",
        ),
        (
            {"body": base64.b64encode(b'[[], {"x": }').decode()},
            "its body is not JSON: see character 12",
        ),
        ({"body": ""}, "its body is not JSON: see character 1"),
        (
            {
                "properties": {
                    "delivery_tag": "x",
                    "delivery_info": {"exchange": "", "routing_key": ""},
                    "body_encoding": "rot13",
                }
            },
            "its body_encoding rot13 is not base64 or utf-8",
        ),
        ({"body": base64.b64encode(b"17").decode()}, NO_BODY),
        ({"body": base64.b64encode(b"[[], {}]").decode()}, NO_BODY),
        ({"body": base64.b64encode(b"[[], 3, {}]").decode()}, NO_BODY),
        ({"body": None}, ""),
        ({"body": 5}, ""),
        ({"body": None, "headers": {}}, ""),
        ({"body": 5, "headers": {}}, ""),
        (
            {"content-type": "application/x-python-serialize"},
            "its content type application/x-python-serialize is not application/json",
        ),
        ({"content-type": "text/plain"}, "its content type text/plain is not application/json"),
        ({"content-type": None}, "its content type null is not application/json"),
        (
            {"headers": {"task": TASK_NAME, "compression": "application/x-gzip"}},
            "its body is not application/x-gzip, or damaged",
        ),
        (
            {"headers": {"task": TASK_NAME, "compression": "lz9"}},
            f"its compression lz9 is none of {', '.join(encoders())}",
        ),
        ({"headers": {"task": TASK_NAME, "compression": ["gzip"]}}, ""),
        ({"headers": {}}, ""),
        ({"headers": {"task": 5}}, ""),
        ({"headers": {"task": None}}, ""),
        ({"headers": {"task": TASK_NAME, "eta": "the day after tomorrow"}}, ""),
        (
            {"headers": {"task": TASK_NAME, "expires": "yesterday"}},
            "its header expires is not a time as Celery writes it (got a string of 9 characters)",
        ),
        (
            {"headers": {"task": TASK_NAME, "timelimit": 5}},
            "its header timelimit is not a pair of seconds (got 5)",
        ),
        (
            {"headers": {"task": TASK_NAME, "stamps": {"who": [["me"]]}}},
            "its header stamps is not an object of texts, numbers or lists of them "
            "(got an object of 1 field)",
        ),
        (
            {"body": base64.b64encode(b'[[], {"prompt": "x"}, {"chain": 5}]').decode()},
            "its chain option is not a list of tasks as Celery writes it (got 5)",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_invalid_message_that_names_its_job_also_ends_it(
    client: Client, changes: dict[str, Any], reason: str, request: pytest.FixtureRequest
) -> None:
    job_id = f"unreadable-{request.node.callspec.indices['changes']}"
    client.redis.lpush(QUEUE, raw(job_id, **changes))
    job = client.job(job_id)
    with pytest.raises(InvalidRequest) as caught:
        job.result(GET_S)
    (entry,) = job.stream(timeout=GET_S)
    assert isinstance(entry.event, Failed)
    (letter,) = letters(client, 1)
    assert (letter["id"], letter["list"], letter["attempts"]) == (job_id, QUEUE, 1)
    assert letter["reason"]
    if reason:
        assert letter["reason"] == reason
        (fault,) = caught.value.faults
        assert (fault.field, fault.rule) == ("message", reason)


def test_names_of_ours_in_an_envelope_change_nothing(
    client: Client, toy_worker: WorkerProcess
) -> None:
    secret = "a secret of the producer"
    others = {"unreadable": f"{secret} \x1b[2J", "size": secret, "payload": [[], {}, {}]}
    client.redis.lpush(QUEUE, raw("named as ours", **others))
    assert client.job("named as ours").result(GET_S).text == "w0 "
    assert secret not in toy_worker.text()


def test_names_of_celery_in_the_options_of_an_expired_job_change_nothing(client: Client) -> None:
    job_id, expired = "expired with options", datetime.now(UTC) - timedelta(seconds=9)
    headers = {"task": TASK_NAME, "id": job_id, "expires": expired.isoformat()}
    body = [[], {"prompt": "x", "max_tokens": 1}, {"properties": {"delivery_tag": "another"}}]
    client.redis.lpush(QUEUE, json.dumps(envelope(body, headers=headers)))
    wait_until(lambda: client.job(job_id).status().ended)
    assert client.job(job_id).status().state == "cancelled"


BAD_FOLLOW_UPS = {
    "errback": {"errbacks": [{"task": "x", "options": {"task_id": "y", "link": 5}}]},
    "kwargs of an errback": {"errbacks": [{"task": "x", "args": 7}]},
    "link of a chain": {"chain": [{"task": "x", "options": {"group_id": {"a": 1}, "chord": 5}}]},
    "chord": {"chord": {"task": "x", "options": {"group_id": [5]}}},
    "body of a chord": {"chain": [{"task": "x", "subtask_type": "chord", "kwargs": {"body": 7}}]},
}


@pytest.mark.parametrize("name", BAD_FOLLOW_UPS)
@pytest.mark.parametrize("fields", [{"prompt": "x", "max_tokens": 1}, {"prompt": ""}], ids=str)
def test_what_cannot_follow_a_job_is_tried_once(
    client: Client, name: str, fields: dict[str, Any]
) -> None:
    job_id = f"followed by bad {name} {len(fields)}"
    body = [[], fields, BAD_FOLLOW_UPS[name]]
    named = {"task": TASK_NAME, "id": job_id, "group": "g"}
    client.redis.lpush(QUEUE, json.dumps(envelope(body, headers=named)))
    with suppress(InvalidRequest):
        client.job(job_id).result(GET_S)
    wait_until(lambda: not follow_ups_in(client.redis), timeout_s=GET_S)
    clear_letters(client.redis)


@pytest.mark.parametrize("job_id", ["x" * 256, "ü" * 256, "a/b:" * 2_500])
def test_a_job_whose_id_is_too_long_is_refused_with_the_rule(
    client: Client, stock: Celery, job_id: str
) -> None:
    kwargs = {"prompt": "x", "max_tokens": 1}
    result = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE, task_id=job_id)
    with pytest.raises(Exception, match="string of 1 to 255 characters"):
        result.get(timeout=GET_S)
    with pytest.raises(InvalidRequest):
        client.submit(**kwargs, job_id=job_id + "y").result(GET_S)
    assert [letter["id"] for letter in letters(client, 2)] == [job_id + "y", job_id]


def test_an_unknown_task_becomes_a_dead_letter_and_fails_for_its_producer(
    client: Client, stock: Celery
) -> None:
    result = stock.send_task("llorch.nonsense", kwargs={"prompt": "x"}, queue=QUEUE)
    with pytest.raises(Exception, match=r"llorch\.nonsense"):
        result.get(timeout=GET_S)
    (letter,) = letters(client, 1)
    assert letter["id"] == result.id
    assert "llorch.nonsense" in letter["reason"]


def test_an_id_that_collides_with_another_key_harms_no_other_job(
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
    # raw() gives each the same tag, and they outnumber the worker's slots.
    client.redis.lpush(QUEUE, *(raw(f"same-tag-{number}") for number in range(9)))
    for number in range(9):
        assert client.job(f"same-tag-{number}").result(GET_S).text == "w0 "


def typed(kind: object, value: object) -> dict[str, object]:
    return {"__type__": kind, "__value__": value}


BAD_TYPES = {
    **{"decimal": "x", "bytes": 5, "base64": "x", "datetime": "x", "date": 7, "time": None},
    **{"uuid": {"hex": 5}, "unheard of": 1},
}
"""What kombu's decoders raise various errors for."""


def test_a_header_of_a_type_that_kombu_cannot_decode_is_ignored(client: Client) -> None:
    for kind, value in BAD_TYPES.items():
        headers = {"task": TASK_NAME, "price": typed(kind, value), "list": typed([], value)}
        client.redis.lpush(QUEUE, raw(f"typed {kind}", headers=headers))
    for kind in BAD_TYPES:
        assert client.job(f"typed {kind}").result(GET_S).text == "w0 "


def test_no_error_of_a_malformed_message_speaks_of_python(
    client: Client, toy_worker: WorkerProcess
) -> None:
    sent = {f"malformed-{seed}": malformed(seed, f"malformed-{seed}") for seed in range(600)}
    client.redis.lpush(QUEUE, *sent.values())
    wait_until(
        lambda: not jobs_that_wait(client.redis) and not held_ids(client.redis), timeout_s=GET_S
    )
    ends = [state for job_id in sent if (state := stored_result(client.redis, job_id))]
    told = [json.loads(end)["result"]["exc_message"][0] for end in ends if '"FAILURE"' in end]
    told += [json.loads(letter)["reason"] for letter in letters_in(client.redis)]
    assert len(told) > len(sent) / 2
    assert list(filter(PYTHON.search, told)) == []
    assert not [end for end in ends if '"STARTED"' in end]
    clear_letters(client.redis)


PYTHON = re.compile(
    r"\b\w*(Error|Exception|Operation)\b|NoneType|hashable|subscript|iterable|has no |expected|"
    r"Traceback|'(str|int|list|dict|float|bool|bytes)'|argument|codec|\(error\)"
)
"""What its own messages say."""


@pytest.mark.parametrize(
    "said",
    [
        json.dumps(envelope({}, headers={"clock": 1, "x": typed("decimal", "x")})),
        json.dumps(envelope({}, headers={"clock": 1, "x": typed("bytes", 5)})),
        json.dumps(envelope({}, headers={"clock": 1, "compression": "gzip"})),
        json.dumps(envelope(b"{", headers={"clock": 1})),
        "[" * 100_000,
        "[]",
        "{}",
        "17",
    ],
    ids=lambda said: said[-40:],
)
def test_a_control_message_that_cannot_be_read_ends_no_worker(
    toy_worker: WorkerProcess, client: Client, stock: Celery, said: str
) -> None:
    assert client.redis.publish("/0.celery.pidbox", said) == 1
    assert stock.control.inspect([toy_worker.hostname], timeout=GET_S, limit=1).ping()


def test_ids_of_any_script_run(client: Client) -> None:
    for job_id in ("Zürich", "東京", "🦙", 'quote"%0', "space and\ttab"):
        client.redis.lpush(QUEUE, raw(job_id))
        assert client.job(job_id).result(GET_S).text == "w0 "


def test_the_stats_of_a_worker_count_the_dead_letters(
    client: Client, stock: Celery, toy_worker: WorkerProcess
) -> None:
    client.redis.lpush(QUEUE, b"no json", b"{}")
    letters(client, 2)
    stats = stock.control.inspect([toy_worker.hostname], timeout=GET_S).stats()
    assert stats[toy_worker.hostname]["dead_letters"] == 2
