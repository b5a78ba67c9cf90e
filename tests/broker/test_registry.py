from __future__ import annotations

import os
import time

from llorch_worker.broker import keys, registry
from llorch_worker.broker.connection import connect
from llorch_worker.broker.registry import WorkerCard
from tests.services import RedisServer


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
        assert 0 < client.ttl(keys.worker("a@h")) <= registry.WORKER_TTL_S
        registry.withdraw(client, "a@h")
        assert [worker.hostname for worker in registry.workers(client)] == ["b@h"]
        assert sorted(registry.models(client)) == ["m", "other"]
        assert registry.models(client)["m"].max_context == 128


def test_a_silent_worker_is_not_listed(redis_server: RedisServer) -> None:
    with connect(redis_server.url) as client:
        client.flushall()
        registry.announce(client, card("a@h"))
        client.delete(keys.worker("a@h"))  # as its TTL does
        assert registry.workers(client) == []
        assert client.scard(keys.WORKERS) == 0
