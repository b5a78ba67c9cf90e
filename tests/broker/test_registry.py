from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys, queues, registry, stored
from llorch_worker.broker.connection import connect
from llorch_worker.broker.queues import worker_lists, worker_queue
from llorch_worker.broker.registry import WorkerCard
from tests.broker.jobs import DAYS_S, note_seen
from tests.broker.test_maxmemory import fill
from tests.messages import GOOD_BODY, envelope
from tests.services import RedisServer
from tests.store import announce_model, write_record

QUEUE = worker_queue("toy", "gpu0@host")
CARD = keys.worker(worker_queue("other", "a@h"))


def card(hostname: str, model: str = "m") -> WorkerCard:
    return WorkerCard(
        hostname=hostname,
        pid=os.getpid(),
        model=model,
        max_context=128,
        max_sequences=4,
        device="cpu",
        started_at=time.time(),
        last_seen=time.time(),
        engine={"running": 0},
    )


def test_a_worker_is_listed_while_it_lives_and_its_model_stays_known(
    redis_server: RedisServer,
) -> None:
    with connect(redis_server.url) as client:
        client.flushall()
        registry.announce(client, card("b@h"))
        registry.announce(client, card("a@h", "other"))
        assert [worker.hostname for worker in registry.workers(client)] == ["a@h", "b@h"]
        assert 0 < client.ttl(CARD) <= registry.GONE_AFTER_S
        assert registry.living(client, "other") == ["llorch.other@a.h"]
        registry.withdraw(client, "other", "a@h")
        assert [worker.hostname for worker in registry.workers(client)] == ["b@h"]
        assert registry.living(client, "other") == []
        assert registry.is_remembered(client, "other", "a@h")
        assert sorted(registry.models(client)) == ["m", "other"]
        assert registry.models(client)["m"].max_context == 128


def test_a_model_is_as_old_as_its_first_announcement(redis_server: RedisServer) -> None:
    with connect(redis_server.url) as client:
        client.flushall()
        began_s = int(time.time())
        registry.announce(client, card("a@h"))
        first = registry.models(client)["m"]
        assert first.created is not None
        assert began_s <= first.created <= time.time()
        client.hset(keys.MODELS, "m", first.model_copy(update={"created": 5}).model_dump_json())
        registry.announce(client, card("b@h"))
        assert registry.models(client)["m"].created == 5


ODD_FIGURES: tuple[Any, ...] = ("x", -1, 1e300, float("nan"), 10**400, None, [])


@pytest.mark.parametrize(
    "odd",
    [
        {"engine": None},
        *({"engine": {"running": figure}} for figure in ODD_FIGURES),
        {"max_sequences": 10**400},
        {"last_seen": float("inf")},
        {"last_seen": 10**400},
        {"recent": {"e2e_ms": {"1000000": 1}}},
        {"metrics_host": "evil.example/x?y"},
        {"metrics_host": "h", "metrics_port": -5},
    ],
)
def test_an_odd_worker_card_hides_no_other(redis_server: RedisServer, odd: dict[str, Any]) -> None:
    with connect(redis_server.url) as client:
        client.flushall()
        registry.announce(client, card("a@h"))
        registry.announce(client, card("odd@h"))
        document = json.dumps(card("odd@h").model_dump(mode="json") | odd)
        client.set(keys.worker(worker_queue("m", "odd@h")), document)
        assert [worker.hostname for worker in registry.workers(client)] == ["a@h"]


def test_what_is_no_card_is_skipped_with_one_warning_a_kind(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_warned", set())
    with connect(redis_server.url) as client, caplog.at_level(logging.WARNING):
        client.flushall()
        registry.announce(client, card("a@h"))
        announce_model(client, "weird", "{}")
        registry.announce(client, card("odd@h"))
        client.set(keys.worker(worker_queue("m", "odd@h")), "{secret")
        for _ in range(2):
            assert list(registry.models(client)) == ["m"]
            assert [worker.hostname for worker in registry.workers(client)] == ["a@h"]
        assert registry.announce(client, card("odd@h")) is None
        assert len(registry.workers(client)) == 2
    told = [record.getMessage() for record in caplog.records]
    assert [("ModelCard" in line, "WorkerCard" in line) for line in told] == [
        (True, False),
        (False, True),
    ]
    assert "secret" not in str(told)


def test_at_maxmemory_a_worker_still_lives(store: redis.Redis) -> None:
    """Else its jobs would go to others, and it would share none of theirs."""
    registry.announce(store, card("a@h"))
    note_seen(store, worker_queue("m", "a@h"), ago_s=20)
    fill(store)
    registry.announce(store, card("a@h"), whole=False)
    assert registry.living(store, "m") == ["llorch.m@a.h"]


def test_every_list_of_a_worker_that_is_gone_moves_to_its_shared_list(store: redis.Redis) -> None:
    moved_from = worker_lists(QUEUE)
    for name in moved_from:
        store.lpush(name, "a job", "another")
    note_seen(store, QUEUE, ago_s=DAYS_S)
    assert registry.reroute(store, "toy", grace_s=0) == {QUEUE: 2 * len(moved_from)}
    assert not store.exists(*moved_from)
    shared = queues.queues("toy")
    for name in queues.lists(shared):
        assert store.lrange(name, 0, -1) == ["another", "a job"]


def test_jobs_that_were_handed_to_a_worker_that_leaves_move_at_once(store: redis.Redis) -> None:
    messages = [json.dumps(envelope(GOOD_BODY, headers={"id": job_id})) for job_id in "abc"]
    store.lpush(QUEUE, *messages)
    # It was claimed before. The others were sent to that worker, which may come back.
    write_record(store, "b", state="queued")
    registry.announce(store, card("gpu0@host", "toy"), leaving=True)
    assert registry.takers(store, "toy") == []
    assert registry.reroute(store, "toy", grace_s=60) == {QUEUE: 1}
    assert store.lrange("llorch.toy", 0, -1) == [messages[1]]
    assert store.lrange(QUEUE, 0, -1) == [messages[2], messages[0]]


def test_jobs_stay_where_the_shared_list_is_a_key_of_another_type(store: redis.Redis) -> None:
    shared = queues.lists(queues.queues("toy"))[-1]
    (own,) = [name for name in worker_lists(QUEUE) if name.replace(QUEUE, "llorch.toy") == shared]
    store.set(shared, "somebody's")
    store.lpush(own, "a job")
    store.lpush(QUEUE, "another")
    note_seen(store, QUEUE, ago_s=DAYS_S)
    assert registry.reroute(store, "toy", grace_s=0) == {QUEUE: 1}
    assert store.lrange(own, 0, -1) == ["a job"]
    assert store.lrange("llorch.toy", 0, -1) == ["another"]


def test_a_job_whose_id_names_a_key_of_another_type_moves_with_the_others(
    store: redis.Redis,
) -> None:
    """The record of "abc:events" has the name of the events of "abc"."""
    store.xadd(keys.events("abc"), {"e": "token"})
    store.lpush(QUEUE, json.dumps(envelope(GOOD_BODY, headers={"id": "abc:events"})))
    registry.announce(store, card("gpu0@host", "toy"), leaving=True)
    assert registry.reroute(store, "toy", grace_s=60) == {}
    note_seen(store, QUEUE, ago_s=DAYS_S)
    assert registry.reroute(store, "toy", grace_s=60) == {QUEUE: 1}


def test_the_lists_of_a_worker_that_lives_stay(store: redis.Redis) -> None:
    note_seen(store, QUEUE)
    store.lpush(QUEUE, "a job")
    assert registry.reroute(store, "toy", grace_s=0) == {}
    assert store.llen(QUEUE) == 1
