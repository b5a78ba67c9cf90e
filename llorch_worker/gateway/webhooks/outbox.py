"""The webhooks that are to be delivered, and those that were given up; in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis.asyncio

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import unless_refused
from llorch_worker.broker.fleet import leases
from llorch_worker.broker.scripts import run_script_async
from llorch_worker.broker.waiting.enqueue import LONGEST_WAIT_S
from llorch_worker.gateway.fair_share import Due, due

KEPT_S = LONGEST_WAIT_S
"""How long a webhook is known at most."""
MOST_DEAD = 1_000
"""Dead letters of one key; older ones are forgotten."""


@dataclass(frozen=True)
class Webhook:
    """An event to send once it has happened."""

    id: str
    url: str
    caller: str
    kind: str
    since_ms: int
    """Since when it could be sent; until then, since when it is expected."""
    attempts: int = 0
    body: str | None = None
    reason: str | None = None


class Outbox:
    """Every method may raise ``RedisError``."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        # redis-py's annotations cover all its clients at once.
        self._redis: Any = client

    async def add(self, webhook_id: str, url: str, caller: str, kind: str, *, in_s: float) -> None:
        """Adds a webhook that waits for its event, to be looked at ``in_s`` from now."""
        now_ms = await self.now_ms()
        fields = {"url": url, "caller": caller, "kind": kind, "since_ms": now_ms, "attempts": 0}
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.webhook(webhook_id), mapping=fields)
            pipe.expire(keys.webhook(webhook_id), KEPT_S)
            pipe.zadd(keys.WEBHOOKS, {webhook_id: now_ms + int(in_s * 1e3)})
            await pipe.execute()

    async def due(self) -> list[Due]:
        """Webhooks whose time has come, each with its key and its URL; ``more``: if its event is
        kept."""
        return await due(self._redis, keys.WEBHOOKS, KEPT_S, keys.webhook, "caller", "url", "kept")

    async def claim(self, chosen: Sequence[str], lease_s: float) -> list[str]:
        """Those of them that are still due. Nobody else gets them before the lease ends."""
        if not chosen:
            return []
        lease = leases.due(keys.WEBHOOKS, lease_s, len(chosen), latest_s=KEPT_S, chosen=chosen)
        taken: list[str] = await run_script_async(self._redis, *lease)
        return taken

    async def put_off(self, webhook_ids: Sequence[str], in_s: float) -> None:
        """Looks at them again ``in_s`` from now."""
        if webhook_ids:
            due_ms = await self.now_ms() + int(in_s * 1e3)
            with unless_refused():
                await self._redis.zadd(keys.WEBHOOKS, dict.fromkeys(webhook_ids, due_ms), xx=True)

    async def get(self, webhook_id: str) -> Webhook | None:
        fields = await self._redis.hgetall(keys.webhook(webhook_id))
        return _webhook(webhook_id, fields) if "url" in fields else None

    async def now_due(self, webhook_id: str) -> None:
        """It may be ready."""
        await self._redis.zadd(keys.WEBHOOKS, {webhook_id: 0}, xx=True)

    async def postpone(self, webhook_id: str, in_s: float, **fields: str | int) -> None:
        """Tries again ``in_s`` from now."""
        due_ms = await self.now_ms() + int(in_s * 1e3)
        async with self._redis.pipeline(transaction=True) as pipe:
            if fields:
                pipe.hset(keys.webhook(webhook_id), mapping=fields)
                pipe.expire(keys.webhook(webhook_id), KEPT_S)
            pipe.zadd(keys.WEBHOOKS, {webhook_id: due_ms}, xx=True)
            await pipe.execute()

    async def complete(self, webhook: Webhook, body: str) -> Webhook | None:
        """Keeps the event, because the job's result may expire before the last attempt. None if the
        webhook was removed meanwhile.

        A Redis that refuses it does not keep it from being sent: the next attempt makes it anew.
        """
        now_ms = await self.now_ms()
        with unless_refused():
            fields = {"body": body, "since_ms": now_ms}
            await self._redis.hset(keys.webhook(webhook.id), mapping=fields)
        if await self._redis.zscore(keys.WEBHOOKS, webhook.id) is None:
            # Nothing else would ever delete the text.
            await self._redis.delete(keys.webhook(webhook.id))
            return None
        return replace(webhook, body=body, since_ms=now_ms)

    async def remove(self, webhook_id: str) -> None:
        # At maxmemory Redis refuses every transaction, and one that was sent would be sent again.
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(keys.webhook(webhook_id))
            pipe.zrem(keys.WEBHOOKS, webhook_id)
            await pipe.execute()

    async def bury(self, webhook: Webhook, reason: str) -> None:
        """Keeps it as a dead letter."""
        dead = keys.dead_webhooks(webhook.caller)
        now_ms = await self.now_ms()
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem(keys.WEBHOOKS, webhook.id)
            pipe.hset(keys.webhook(webhook.id), "reason", reason)
            pipe.expire(keys.webhook(webhook.id), KEPT_S)
            pipe.zadd(dead, {webhook.id: now_ms})
            pipe.zremrangebyrank(dead, 0, -MOST_DEAD - 1)
            pipe.expire(dead, KEPT_S)
            await pipe.execute()

    async def dead(self, caller: str, limit: int) -> list[Webhook]:
        """Dead letters of one key, newest first."""
        ids = await self._redis.zrevrange(keys.dead_webhooks(caller), 0, limit - 1)
        found = [await self.get(each) for each in ids]
        return [each for each in found if each is not None]

    async def revive(self, webhook: Webhook) -> bool:
        """Delivers a dead letter after all; False if it is none, or none of this caller."""
        dead = keys.dead_webhooks(webhook.caller)
        if await self._redis.zscore(dead, webhook.id) is None:
            return False
        now_ms = await self.now_ms()
        # At once: a letter that left its list alone would be lost if Redis refused the rest.
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.webhook(webhook.id), mapping={"attempts": 0, "since_ms": now_ms})
            pipe.zadd(keys.WEBHOOKS, {webhook.id: 0})
            pipe.zrem(dead, webhook.id)
            await pipe.execute()
        return True

    async def now_ms(self) -> int:
        """Redis' own clock, which all gateways share."""
        seconds, microseconds = await self._redis.time()
        return int(seconds) * 1_000 + int(microseconds) // 1_000


def _webhook(webhook_id: str, fields: Mapping[str, str]) -> Webhook:
    return Webhook(
        id=webhook_id,
        url=fields["url"],
        caller=fields["caller"],
        kind=fields["kind"],
        since_ms=int(fields["since_ms"]),
        attempts=int(fields["attempts"]),
        body=fields.get("body"),
        reason=fields.get("reason"),
    )
