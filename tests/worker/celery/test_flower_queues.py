"""What Flower's Broker page counts."""

from __future__ import annotations

import asyncio

import pytest

from llorch_worker.client import Client
from llorch_worker.worker.celery.flower import show_all_queues
from tests.broker.steps import announce, push
from tests.services import RedisServer

pytest.importorskip("flower", reason="needs the flower extra")


def test_jobs_count_inside_and_outside_of_kombus_lists(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flower.api.tasks import GetQueueLengths
    from flower.utils.broker import Redis, RedisBase
    from flower.views.broker import BrokerView

    for changed, name in ((GetQueueLengths, "get"), (BrokerView, "get"), (RedisBase, "queues")):
        monkeypatch.setattr(changed, name, getattr(changed, name))
    show_all_queues()
    with Client(redis_server.url, model="toy") as client:
        client.redis.flushall()
        announce(client.redis)
        for priority in ("high", "normal", "low", "low"):
            client.submit(prompt="x", priority=priority)
        push(client.redis, "stock")
        client.redis.lpush("celery", "another")

        async def count() -> dict[str, int]:
            names = ["llorch.toy", "llorch.toy:high", "celery"]
            found = await Redis(redis_server.url).queues(names)
            return {each["name"]: each["messages"] for each in found}

        assert asyncio.run(count()) == {"llorch.toy": 4, "llorch.toy:high": 1, "celery": 1}
        client.redis.flushall()
