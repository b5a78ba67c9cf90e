"""Webhooks that Redis, their receivers or others' name servers hold up."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import AsyncClient
from llorch_worker.gateway.webhooks.outbox import Outbox
from tests.broker.test_maxmemory import fill
from tests.services import RedisServer


def test_a_dead_letter_outlives_a_retry_that_redis_has_no_room_for(
    own_server: RedisServer,
) -> None:
    async def retry() -> None:
        async with AsyncClient(own_server.url) as client:
            outbox = Outbox(client.redis)
            await outbox.add("a", "http://example.com/", "", "job", in_s=0)
            webhook = await outbox.get("a")
            assert webhook is not None
            await outbox.bury(webhook, "nobody is there")
            letters = await outbox.dead("", 10)
            with connect(own_server.url) as store:
                fill(store)
                with pytest.raises(RedisError):
                    await outbox.revive(webhook)
                assert await outbox.dead("", 10) == letters
                store.config_set("maxmemory", 0)
            assert await outbox.revive(webhook)
            assert not await outbox.revive(webhook)
            assert [each.id for each in await outbox.due()] == ["a"]

    asyncio.run(retry())
