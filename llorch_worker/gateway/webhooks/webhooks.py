"""Delivers webhooks: from the end of a job, or a document, to its receiver."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import broker_errors
from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.client import AsyncClient, AsyncJob, BrokerUnavailable
from llorch_worker.client.cancelling import cancelled
from llorch_worker.contract import InvalidRequest, LlorchError, describe
from llorch_worker.contract.errors import defect_of
from llorch_worker.gateway.fair_share import MOST_DUE, Due, fairly
from llorch_worker.gateway.job_document import JobDocument
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.ownership import may
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.gateway.webhooks.address import url_fault
from llorch_worker.gateway.webhooks.outbox import Outbox, Webhook
from llorch_worker.gateway.webhooks.post import ATTEMPT_S, NotDelivered, Poster
from llorch_worker.gateway.webhooks.receivers import Receivers, receiver_of

logger = logging.getLogger(__name__)

LEASE_S = 2 * ATTEMPT_S
"""How long a gateway has for an attempt before another makes one."""
POLL_S = 1.0
MOST_AT_ONCE = 64
MOST_WATCHED = 10_000
"""Jobs whose ends a gateway awaits. Of others it learns by looking."""
LOOK_S, LONGEST_LOOK_S = 5.0, 60.0
"""How often some gateway looks whether a job has ended; less often for one that runs long."""
LONGEST_PAUSE_S = 3600.0
ENQUEUED_WITHIN_MS = 60_000

Event = tuple[str, BaseModel]
"""A type, like job.completed, and its data."""
EventOf = Callable[[Webhook], Awaitable[Event | None]]
"""A webhook's event; None: its job has not ended. Raises ``LookupError`` if Redis does not know
the job, or not any more."""


class _Chosen(NamedTuple):
    webhook: Due
    posts: bool
    """Else its receiver has no room, and its event is only kept: a job's result may expire before
    the first attempt."""


class Webhooks:
    """The webhooks of all gateways, as one of them sees them.

    Nothing of them is kept here alone. A gateway that dies during an attempt holds a lease, after
    which another gateway makes the next.
    """

    def __init__(
        self,
        client: AsyncClient,
        own: GatewaySettings,
        secret_of: Callable[[str], str | None],
        event_of: Mapping[str, EventOf],
    ) -> None:
        """``secret_of`` a key's name; ``event_of``: its event, by kind of webhook."""
        self._client = client
        self._own = own
        self._secret_of = secret_of
        self._event_of = event_of
        self._outbox = Outbox(client.redis)
        self._receivers = Receivers(own.webhook_retry_s)
        self._outage = RedisOutage("deliver webhooks")
        self._watchers: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    # For those who have events to send --------------------------------------------------------

    async def expect(self, job_id: str, url: str, caller: Caller, kind: str = "job") -> None:
        """Notifies ``url`` of the job's end. Called before the job is enqueued: a gateway that dies
        after that owes the webhook.

        Raises:
            InvalidRequest: the URL is not allowed, or there is no secret for this caller.
            BrokerUnavailable
        """
        self.check(url, caller)
        with broker_errors(self._client.settings.redis_url):
            await self._outbox.add(job_id, url, caller.name, kind, in_s=LOOK_S)

    async def forget(self, job_id: str) -> None:
        """The job was not enqueued."""
        with broker_errors(self._client.settings.redis_url):
            await self._outbox.remove(job_id)

    def watch(self, job: AsyncJob) -> None:
        """Sends the event at once; without this call, within a minute."""
        if len(self._watchers) < MOST_WATCHED:
            task = asyncio.create_task(self._await_end(job))
            self._watchers.add(task)
            task.add_done_callback(self._watchers.discard)

    async def due(self, webhook_id: str) -> None:
        """The event of an expected webhook has happened. Without this call it is sent within a
        minute."""
        with suppress(RedisError):
            await self._outbox.now_due(webhook_id)
        self._news.set()

    def check(self, url: str, caller: Caller) -> None:
        """Raises ``InvalidRequest`` if webhooks of ``caller`` cannot go there."""
        rule = url_fault(url, private=self._own.private_callbacks)
        if rule is None and self._secret_of(caller.name) is None:
            rule = (
                "needs a secret to sign with: webhook_secret in the key's entry of the file of "
                "keys, or LLORCH_GATEWAY_WEBHOOK_SECRET"
            )
        if rule is not None:
            raise InvalidRequest.from_fault("callback_url", rule, describe(url))

    async def dead(self, caller: Caller, limit: int) -> list[Webhook]:
        """The caller's dead letters, newest first."""
        with broker_errors(self._client.settings.redis_url):
            return await self._outbox.dead(caller.name, limit)

    async def retry(self, webhook_id: str, caller: Caller) -> bool:
        """Tries a dead letter again; False if the caller has no such one."""
        with broker_errors(self._client.settings.redis_url):
            webhook = await self._outbox.get(webhook_id)
            if webhook is None or not may(caller, webhook.caller):
                return False
            revived = await self._outbox.revive(webhook)
        self._news.set()
        return revived

    async def _await_end(self, job: AsyncJob) -> None:
        try:
            await job.result()
        except LlorchError:
            pass
        except (BrokerUnavailable, RuntimeError):
            # A later look finds the end.
            return
        try:
            await self._outbox.now_due(job.id)
        except RedisError:
            return
        self._news.set()

    # Delivery ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Delivers meanwhile."""
        poster = Poster(private=self._own.private_callbacks)
        task = asyncio.create_task(self._deliver_all(poster), name="llorch-webhooks")
        try:
            yield
        finally:
            await cancelled(task, *self._watchers)
            await poster.close()

    async def _deliver_all(self, poster: Poster) -> None:
        attempts: dict[asyncio.Task[None], _Chosen] = {}
        waiting: list[Due] = []
        clock = asyncio.get_running_loop().time
        look_at_s = clock()
        try:
            while True:
                if self._news.is_set() or clock() >= look_at_s:
                    self._news.clear()
                    waiting = await self._look(waiting)
                    look_at_s = clock() + POLL_S
                chosen = self._startable(waiting, list(attempts.values()))
                waiting = [each for each in waiting if each.id not in chosen]
                for webhook_id in await self._claim(list(chosen)):
                    posts = chosen[webhook_id].posts
                    attempt = asyncio.create_task(
                        self._attempt(webhook_id, poster if posts else None)
                    )
                    attempts[attempt] = chosen[webhook_id]
                    attempt.add_done_callback(attempts.pop)
                news = asyncio.create_task(self._news.wait())
                left_s = max(0.0, look_at_s - clock())
                await asyncio.wait(
                    (news, *attempts), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                news.cancel()
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _look(self, before: list[Due]) -> list[Due]:
        """The webhooks that are due; ``before``: those that were left of the last look."""
        try:
            due = await self._outbox.due()
            if len(due) == MOST_DUE and len(before) > MOST_DUE // 2:
                # They wait for their receivers, and hide others.
                left = {each.id for each in before}
                await self._outbox.put_off([each.id for each in due if each.id in left], LOOK_S)
        except RedisError as error:
            self._outage.failed(error)
            return []
        self._outage.over()
        return due

    def _startable(self, waiting: list[Due], under_way: list[_Chosen]) -> dict[str, _Chosen]:
        """What may be tried now: each key has a fair share, and every receiver has its bounds."""
        per_receiver = Counter(receiver_of(each.webhook.what) for each in under_way if each.posts)
        per_owner = Counter(each.webhook.owner for each in under_way)
        chosen: dict[str, _Chosen] = {}
        for each in fairly(waiting, per_owner, len(waiting)):
            if len(under_way) + len(chosen) == MOST_AT_ONCE:
                break
            receiver = receiver_of(each.what)
            posts = self._receivers.has_room(receiver, per_receiver[receiver])
            if posts or not each.more:
                per_receiver[receiver] += posts
                chosen[each.id] = _Chosen(each, posts)
        return chosen

    async def _claim(self, chosen: list[str]) -> list[str]:
        try:
            return await self._outbox.claim(chosen, LEASE_S)
        except RedisError as error:
            self._outage.failed(error)
            return []

    async def _attempt(self, webhook_id: str, poster: Poster | None) -> None:
        try:
            webhook = await self._outbox.get(webhook_id)
            if webhook is None:
                await self._outbox.remove(webhook_id)
            else:
                await self._try(webhook, poster)
        except (RedisError, BrokerUnavailable) as error:
            # After the lease somebody tries again.
            logger.warning("webhook %s waits for Redis: %s", webhook_id, type(error).__name__)
        except Exception as error:
            logger.error("webhook %s failed", webhook_id, exc_info=defect_of(error, "gateway"))

    async def _try(self, webhook: Webhook, poster: Poster | None) -> None:
        if webhook.body is None:
            complete = await self._completed(webhook)
            if complete is None:
                return
            webhook = complete
        if poster is None:
            # In its turn, before those whose events were kept later.
            await self._outbox.postpone(webhook.id, 0, kept=1)
            return
        secret = self._secret_of(webhook.caller)
        try:
            if secret is None:
                raise NotDelivered("its key has no secret any more")
            await poster.post(webhook, secret)
        except NotDelivered as error:
            self._receivers.note(receiver_of(webhook.url), answered=error.answered)
            await self._failed(webhook, error)
        else:
            self._receivers.note(receiver_of(webhook.url), answered=True)
            logger.info("webhook %s was delivered", webhook.id)
            await self._outbox.remove(webhook.id)

    async def _completed(self, webhook: Webhook) -> Webhook | None:
        """With its body, if the job has ended."""
        age_ms = await self._outbox.now_ms() - webhook.since_ms
        try:
            event = await self._event_of[webhook.kind](webhook)
        except LookupError:
            if age_ms > ENQUEUED_WITHIN_MS:
                await self._bury(webhook, "there is no such job, or its result has expired")
                return None
            event = None
        if event is None:
            look_s = min(max(LOOK_S, age_ms / 4e3), LONGEST_LOOK_S)
            await self._outbox.postpone(webhook.id, look_s)
            return None
        # A long result would stop the event loop.
        body = await asyncio.to_thread(_body, webhook.id, *event)
        return await self._outbox.complete(webhook, body)

    async def _failed(self, webhook: Webhook, error: NotDelivered) -> None:
        reason, attempts = str(error), webhook.attempts + 1
        pause_s = min(self._own.webhook_retry_s * 2.0**webhook.attempts, LONGEST_PAUSE_S)
        # Webhooks that failed together should not all come back together.
        pause_s *= random.uniform(1.0, 1.2)
        age_s = (await self._outbox.now_ms() - webhook.since_ms) / 1e3
        if error.for_good or age_s + pause_s > self._own.webhook_give_up_s:
            await self._bury(webhook, reason)
            return
        logger.info("webhook %s: attempt %d failed: %s", webhook.id, attempts, reason)
        await self._outbox.postpone(webhook.id, pause_s, attempts=attempts, reason=reason)

    async def _bury(self, webhook: Webhook, reason: str) -> None:
        logger.warning("webhook %s is a dead letter: %s", webhook.id, reason)
        await self._outbox.bury(webhook, reason)


def _body(webhook_id: str, type: str, data: BaseModel) -> str:
    now = datetime.now(UTC)
    envelope = _Envelope(
        id=f"evt_{webhook_id}",
        created_at=int(now.timestamp()),
        type=type,
        timestamp=now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        data=data,
    )
    # Of a job, a GET returns what there is.
    return envelope.model_dump_json(by_alias=True, exclude_none=isinstance(data, JobDocument))


class _Envelope(BaseModel):
    """OpenAI's event, with the ``timestamp`` of Standard Webhooks."""

    id: str
    object: Literal["event"] = "event"
    created_at: int
    type: str
    timestamp: str
    data: Any
