"""Webhooks that Redis, their receivers or others' name servers hold up."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import AsyncClient
from llorch_worker.gateway.batches.record import Counts
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.gateway.webhook_secret import new_secret
from llorch_worker.gateway.webhooks.outbox import Outbox, Webhook
from llorch_worker.gateway.webhooks.post import NotDelivered, Poster
from llorch_worker.gateway.webhooks.webhooks import Event, EventOf, Webhooks
from tests.broker.test_maxmemory import fill
from tests.gateway.receiver import Receiver, running_receiver
from tests.services import RedisServer, free_port

SECRET = new_secret()
GET_S = 60


async def with_a_webhook(client: AsyncClient) -> tuple[Outbox, Webhook]:
    outbox = Outbox(client.redis)
    await outbox.add("a", "http://example.com/", "", "job", in_s=0)
    webhook = await outbox.get("a")
    assert webhook is not None
    return outbox, webhook


def test_a_dead_letter_outlives_a_retry_that_redis_has_no_room_for(
    own_server: RedisServer,
) -> None:
    async def retry() -> None:
        async with AsyncClient(own_server.url) as client:
            outbox, webhook = await with_a_webhook(client)
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


@asynccontextmanager
async def delivering(
    redis_url: str, files: Path, event_of: EventOf, **settings: Any
) -> AsyncIterator[tuple[Webhooks, AsyncClient]]:
    own = GatewaySettings(files=str(files), private_callbacks=True, **settings)
    async with AsyncClient(redis_url) as client:
        webhooks = Webhooks(client, own, lambda _: SECRET, {"job": event_of})
        async with webhooks.running():
            yield webhooks, client


def test_a_webhook_is_sent_where_redis_has_no_room(own_server: RedisServer, tmp_path: Path) -> None:
    happened = asyncio.Event()

    async def event_of(_: Webhook) -> Event | None:
        return ("job.completed", Counts(total=3)) if happened.is_set() else None

    async def send(receiver: Receiver) -> None:
        async with delivering(own_server.url, tmp_path, event_of) as (webhooks, client):
            await webhooks.expect("a", receiver.url, Caller())
            with connect(own_server.url) as store:
                fill(store)
                happened.set()
                while await Outbox(client.redis).get("a") is not None:
                    await asyncio.sleep(0.1)

    with running_receiver() as receiver:
        asyncio.run(asyncio.wait_for(send(receiver), GET_S))
        (delivery,) = receiver.deliveries
    assert delivery.verified(SECRET)["data"]["total"] == 3


def test_an_event_is_kept_while_its_receiver_does_not_answer(
    own_server: RedisServer, tmp_path: Path
) -> None:
    async def event_of(_: Webhook) -> Event:
        return "job.completed", Counts()

    async def keep() -> None:
        nobody = f"http://127.0.0.1:{free_port()}/"
        async with delivering(own_server.url, tmp_path, event_of, webhook_retry_s=3600) as (
            webhooks,
            client,
        ):
            outbox = Outbox(client.redis)

            async def until(webhook_id: str, done: Callable[[Webhook], Any]) -> None:
                await webhooks.expect(webhook_id, nobody, Caller())
                await webhooks.due(webhook_id)
                while (found := await outbox.get(webhook_id)) is None or not done(found):
                    await asyncio.sleep(0.1)

            await until("tried", lambda webhook: webhook.attempts)
            await until("next", lambda webhook: webhook.body and not webhook.attempts)
            # It waits for its turn, and only that.
            while [each.id for each in await outbox.due()] != ["next"]:
                await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(keep(), GET_S))


def test_a_webhook_that_is_removed_while_its_event_is_made_leaves_no_text(
    own_server: RedisServer,
) -> None:
    async def forget() -> None:
        async with AsyncClient(own_server.url) as client:
            outbox, webhook = await with_a_webhook(client)
            await outbox.remove("a")
            assert await outbox.complete(webhook, "the text") is None
            assert await client.redis.keys("*webhook*") == []

    asyncio.run(forget())


def test_slow_name_servers_of_one_key_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, go_on = socket.getaddrinfo, threading.Event()

    def slow(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "slow.example":
            go_on.wait(GET_S)
            raise OSError
        return ask(host, *rest, **more)

    def webhook(caller: str, url: str) -> Webhook:
        return Webhook("a", url, caller, "job", since_ms=0, body="{}")

    async def post(receiver: Receiver) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        poster = Poster(private=True)
        held_up = [
            asyncio.create_task(poster.post(webhook("one", "http://slow.example/"), SECRET))
            for _ in range(20)
        ]
        await poster.post(webhook("other", receiver.url), SECRET)
        assert not any(each.done() for each in held_up)
        go_on.set()
        assert {*map(type, await asyncio.gather(*held_up, return_exceptions=True))} == {
            NotDelivered
        }
        await poster.close()

    with running_receiver() as receiver:
        asyncio.run(asyncio.wait_for(post(receiver), GET_S))
        assert len(receiver.deliveries) == 1
