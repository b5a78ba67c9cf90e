"""The short way of ``lua/claim.lua`` for one new job beside that for all jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from llorch_worker.broker import claims, keys, queues
from llorch_worker.broker.message import ENQUEUED_AT
from llorch_worker.broker.message import PLACE as PLACE_HEADER
from tests.broker.jobs import TERMS, push
from tests.messages import GOOD_BODY, QUEUE, envelope

WORKER = "gpu0@host"
PLACE = queues.worker_queue("toy", WORKER)
TIMES = ("fence", "history", "first_claim_ms", "sent", "at_ms", "date_done")

Prepare = Callable[[redis.Redis], None]


def known_to_enqueue(store: redis.Redis) -> None:
    push(store, "a")
    idempotency = keys.idempotency("toy", "mine")
    store.hset(keys.job("a"), mapping={"sent": 1, "idempotency": idempotency})
    store.expire(keys.job("a"), 60)
    store.set(idempotency, "a", ex=60)


def junk(store: redis.Redis) -> None:
    store.lpush(QUEUE, "no message")


def no_bytes_of_text(store: redis.Redis) -> None:
    store.lpush(QUEUE, b"\xff\xfe")


def ended(store: redis.Redis) -> None:
    push(store, "a")
    store.hset(keys.job("a"), "state", "ended")


def running(store: redis.Redis) -> None:
    push(store, "a")
    store.hset(keys.job("a"), mapping={"state": "claimed", "fence": 7})


def came_back(store: redis.Redis) -> None:
    push(store, "a")
    record = {"state": "queued", "attempts": 2, "fence": 7, "history": "w@h 1\n", "strikes": 1,
              "deaths": 1, "peers": 1, "first_claim_ms": 1, "list": QUEUE}  # fmt: skip
    store.hset(keys.job("a"), mapping=record)


def exhausted(store: redis.Redis) -> None:
    push(store, "a")
    record = {"state": "queued", "deaths": 20, "strikes": 3, "alone": 1, "fence": 7, "list": QUEUE}
    store.hset(keys.job("a"), mapping=record)


def revoked(store: redis.Redis) -> None:
    push(store, "a")
    store.set(keys.result("a"), json.dumps({"status": "REVOKED"}))


def record_of_another_type(store: redis.Redis) -> None:
    push(store, "a")
    store.set(keys.job("a"), "somebody's")


def in_own_queue(store: redis.Redis) -> None:
    push(store, "a")
    store.rename(QUEUE, PLACE)


def placed_behind_others(store: redis.Redis) -> None:
    for job_id, worker in (("a", "gpu1@host"), ("b", WORKER), ("c", WORKER)):
        place = {ENQUEUED_AT: 1000.5, PLACE_HEADER: queues.worker_queue("toy", worker)}
        message = envelope(GOOD_BODY)
        headers = place | message.pop("headers") | {"id": job_id}
        store.lpush(QUEUE, json.dumps({"headers": headers} | message))


def junk_before_others(store: redis.Redis) -> None:
    junk(store)
    push(store, "a", "b")


def of_workers(workers: int, prepare: Prepare) -> Prepare:
    def prepared(store: redis.Redis) -> None:
        prepare(store)
        store.set(keys.watch("toy"), workers)

    return prepared


def two_in_own_queue(store: redis.Redis) -> None:
    push(store, "a", "b")
    store.rename(QUEUE, PLACE)


def stray_key(store: redis.Redis) -> None:
    push(store, "a", "b")
    store.set(f"{QUEUE}{queues.LOWER_STEPS[0]}", "somebody's")


CASES: dict[str, Prepare] = {
    "new": lambda store: push(store, "a"),
    "with an idempotency key": known_to_enqueue,
    "an id to be escaped": lambda store: push(store, 'a"\\%1é'),
    "a long id": lambda store: push(store, "a" * 70_000),
    "due": lambda store: push(store, "a", eta="2001-01-01T00:00:00+00:00"),
    "later": lambda store: push(store, "a", eta="2999-01-01T00:00:00+00:00"),
    "an ETA that cannot be read": lambda store: push(store, "a", eta="soon"),
    "two": lambda store: push(store, "a", "b"),
    "two of two workers": of_workers(2, lambda store: push(store, "a", "b")),
    "three of two workers": of_workers(2, lambda store: push(store, "a", "b", "c")),
    "a copy before others": of_workers(9, lambda store: push(store, "a", "a", "b")),
    "junk before others": of_workers(9, junk_before_others),
    "placed behind others": of_workers(9, placed_behind_others),
    "two in the worker's own queue": of_workers(9, two_in_own_queue),
    "a copy": lambda store: push(store, "a", "a"),
    "a stray key in place of a list": of_workers(2, stray_key),
    "junk": junk,
    "no text": no_bytes_of_text,
    "ended": ended,
    "running": running,
    "came back": came_back,
    "exhausted": exhausted,
    "revoked": revoked,
    "a record of another type": record_of_another_type,
    "in the worker's own queue": in_own_queue,
}


def claimed(store: redis.Redis, rings: int) -> list[tuple[Any, ...]]:
    taken = claims.claim(
        store, consumed=queues.queues("toy", WORKER), held=(), limit=4, worker=WORKER, terms=TERMS,
        rings=rings, place=PLACE,
    )  # fmt: skip
    return [
        (each.job_id, each.message, each.attempt, each.list_key, each.suspect, each.first,
         each.cancelled, each.due_ms, each.retried_ms)
        for each in taken.claims
    ]  # fmt: skip


def contents(store: redis.Redis) -> dict[str, Any]:
    """All keys but those of the times; of a lease only whose it is."""
    found: dict[str, Any] = {}
    for key in store.scan_iter():
        match store.type(key):
            case "hash":
                found[key] = {k: v for k, v in store.hgetall(key).items() if k not in TIMES}
            case "list":
                found[key] = [_without_times(each) for each in store.lrange(key, 0, -1)]
            case "zset" if key in (keys.LEASES, keys.FOLLOW_UPS):
                found[key] = set(store.zrange(key, 0, -1))
            case "zset":
                found[key] = store.zrange(key, 0, -1, withscores=True)
            case "string":
                found[key] = _without_times(store.get(key))
            case "stream":
                found[key] = [fields for _, fields in store.xrange(key)]
        found[key, "expires"] = store.ttl(key) >= 0
    return found


def _without_times(text: Any) -> Any:
    try:
        document = json.loads(text)
    except ValueError:
        return text
    if not isinstance(document, dict):
        return document
    return {name: value for name, value in document.items() if name not in TIMES}


@pytest.mark.parametrize("prepare", CASES.values(), ids=CASES)
def test_one_job_is_claimed_as_any_other(store: redis.Redis, prepare: Prepare) -> None:
    found = []
    for rings in (keys.RUNG, keys.RUNG | keys.ELSEWHERE):
        store.flushall()
        prepare(store)
        found.append((claimed(store, rings), contents(store)))
    assert found[0] == found[1]
