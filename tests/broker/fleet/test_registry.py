from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry, stored
from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard
from llorch_worker.broker.queues import place_of
from tests.broker.steps import DAYS_S, note_seen
from tests.broker.test_maxmemory import fill
from tests.services import RedisServer
from tests.store import announce_model

QUEUE = place_of("toy", "gpu0@host")
CARD = keys.worker(place_of("other", "a@h"))


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
        assert registry.remembered(client)["other"] == ["llorch.other@a.h"]
        assert sorted(registry.models(client)) == ["m", "other"]
        assert registry.models(client)["m"].max_context == 128


def test_the_context_of_a_model_that_a_worker_may_load_again_is_awaited(
    redis_server: RedisServer,
) -> None:
    with connect(redis_server.url) as client:
        client.flushall()
        registry.announce(client, card("a@h"))
        registry.announce_model(client, ModelCard(name="m", max_context=256, last_seen=1))
        assert registry.largest_context(client, "m", registry.AWAITED_S) == 256
        client.zincrby(keys.contexts("m"), -1e3 * (registry.AWAITED_S + 1), "256")
        assert registry.largest_context(client, "m", registry.AWAITED_S) == 128
        assert registry.largest_context(client, "m") == 256


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
        client.set(keys.worker(place_of("m", "odd@h")), document)
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
        client.set(keys.worker(place_of("m", "odd@h")), "{secret")
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
    note_seen(store, place_of("m", "a@h"), ago_s=20)
    fill(store)
    registry.announce(store, card("a@h"), whole=False)
    assert registry.living(store, "m") == ["llorch.m@a.h"]


def test_a_worker_that_leaves_takes_no_jobs_from_others(store: redis.Redis) -> None:
    registry.announce(store, card("gpu0@host", "toy"), leaving=True)
    assert registry.takers(store, "toy") == []
    registry.announce(store, card("gpu0@host", "toy"))
    assert [each.hostname for each in registry.takers(store, "toy")] == ["gpu0@host"]


def test_workers_that_are_long_gone_are_forgotten(store: redis.Redis) -> None:
    note_seen(store, place_of("m", "old@h"), ago_s=DAYS_S)
    registry.announce(store, card("a@h"))
    assert registry.remembered(store)["m"] == ["llorch.m@a.h"]


def test_a_worker_that_keeps_several_models_is_one_of_each() -> None:
    several = [card("w1", model).model_copy(update={"models": ("m", "n")}) for model in "mn"]
    cards = [*several, card("w2")]
    assert [registry.count_serving(cards, model) for model in ("m", "n", "o")] == [2, 1, 0]
