"""Next tasks in a message: those that Celery writes are taken, and those that it cannot send are
refused before the job runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature
from kombu.utils.json import dumps, loads

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.settling import Settler
from llorch_worker.broker.messages.message import ENQUEUED_AT
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, InvalidRequest
from llorch_worker.worker.celery.job_message import JobMessage
from llorch_worker.worker.celery.message_faults import fault_of, is_signature
from tests.broker.steps import TERMS, push, take
from tests.messages import QUEUE, envelope
from tests.services import WorkerProcess, wait_until
from tests.store import follow_ups_in

GET_S = 60


@pytest.fixture(scope="module")
def shop() -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False)


def test_what_celery_writes_is_taken(shop: Celery) -> None:
    def task(*args: Any) -> Signature:
        return shop.signature("shop.task", args=args)

    @shop.task(name="shop.own")
    def own(number: int) -> int:
        return number

    at = datetime(2030, 1, 2, tzinfo=UTC)
    for canvas in (
        task(),
        task().set(countdown=3, priority=1, queue="x", link=task(), link_error=[task()]),
        task().set(eta=at, expires=at, serializer="json", compression="gzip", headers={"a": 1}),
        task().set(delivery_mode="transient"),
        task().set(delivery_mode="persistent"),
        task().set(expires=1.5, retry=True, retry_policy={"max_retries": 3}, time_limit=5),
        task().stamp(shop="x"),
        chain(task(), group(task(), task()), task()),
        chord([task(), task()], task()),
        chord(group(task(), task()), chain(task(), task())),
        own.map([1, 2]),
        own.starmap([(1,), (2,)]),
        own.chunks([(1,), (2,)], 3),
        group(chain(task(), task()), chord([task()], task())),
    ):
        assert is_signature(loads(dumps(canvas))), canvas


@pytest.mark.parametrize(
    ("eta", "fault"),
    [(None, None), ("tomorrow", "its eta is not a time as Celery writes it")],
)
def test_an_eta_that_has_come_is_none_of_a_job_that_was_put_back_without_its_record(
    own_client: Client, eta: str | None, fault: str | None
) -> None:
    store = own_client.redis
    due = datetime.now(UTC) + timedelta(hours=1)
    push(store, "a", task=TASK_NAME, eta=eta or due.isoformat())
    if not eta:
        assert not take(store)
        store.zadd(keys.scheduled("toy"), {"a": 0})
        inbox_watch.look(store, "toy", wakes_anyway=True)
    (lost,) = take(store)
    store.flushall()
    assert claims.restore(store, lost)
    (again,) = take(store)
    assert not again.first
    message = JobMessage(again, Settler(store, TERMS, lambda: None), TERMS.max_message_bytes)
    assert fault_of(message) == fault
    if not eta:
        assert message.headers[ENQUEUED_AT] == pytest.approx(due.timestamp(), abs=0.001)


TASK: dict[str, Any] = {
    "task": "shop.task", "args": [], "kwargs": {}, "options": {}, "subtask_type": None,
}  # fmt: skip


def chained(tasks: Any, kind: str = "chain") -> dict[str, Any]:
    return TASK | {"subtask_type": kind, "kwargs": {"tasks": tasks}}


def nested(levels: int) -> dict[str, Any]:
    """Deeper than Python follows, though not than it reads."""
    task = TASK
    for _ in range(levels):
        task = TASK | {"options": {"link_error": task}}
    return task


ODD = [
    *(TASK | {part: odd} for part in ("args", "kwargs", "options") for odd in (None, 3, "x")),
    *(TASK | {"subtask_type": odd} for odd in (3, "map", ["chain"])),
    *(
        TASK | {"options": {name: odd}}
        for name, odd in {
            **{"countdown": "x", "eta": 3, "expires": [1], "priority": "high", "queue": 5},
            **{"serializer": "x", "compression": "x", "headers": 3, "retry_policy": [1]},
            **{"link": 3, "link_error": [3], "chain": 3, "chord": [], "stamped_headers": None},
            **{"producer": 3, "connection": {}, "task_id": 5, "time_limit": float("inf")},
            **{"soft_time_limit": 10**400, "delivery_mode": "x"},
        }.items()
    ),
    *(chained(odd) for odd in (None, 3, [3], [{}], [chained(3)])),
    chained([TASK, 3], "group"),
    TASK | {"subtask_type": "chord", "kwargs": {"header": [TASK], "body": 3}},
    TASK | {"subtask_type": "chunks", "kwargs": {"task": TASK, "it": [1], "n": "x"}},
    TASK | {"subtask_type": "xmap", "kwargs": {"task": TASK, "it": 3}},
]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_what_celery_cannot_send_is_refused(odd: dict[str, Any]) -> None:
    assert not is_signature(odd)


@pytest.mark.parametrize("place", ["callbacks", "errbacks", "chain", "chord"])
@pytest.mark.parametrize("where", ["headers", "options"])
def test_a_job_with_an_odd_next_task_is_refused_without_a_traceback(
    client: Client, toy_worker: WorkerProcess, place: str, where: str
) -> None:
    for number, odd in enumerate([*ODD, nested(380)]):
        job_id = f"{place} {where} {number}"
        given = {place: odd if place == "chord" else [odd]}
        headers = {"task": TASK_NAME, "id": job_id} | (given if where == "headers" else {})
        body = [[], {"prompt": "x", "max_tokens": 1}, given if where == "options" else {}]
        client.redis.lpush(QUEUE, json.dumps(envelope(body, headers=headers)))
        with pytest.raises(InvalidRequest, match=f"its {place} option is not a"):
            client.job(job_id).result(GET_S)
    wait_until(lambda: not follow_ups_in(client.redis))
    assert "Traceback" not in toy_worker.text()
    assert "cannot follow up" not in toy_worker.text()
