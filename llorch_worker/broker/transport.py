"""A kombu transport whose consumers claim jobs instead of popping them.

Producers stay stock: they push to the same lists. kombu's own Redis transport pops a message with
BRPOP and registers it afterwards, and loses it when the worker dies in between; this one takes it
with one script that pops, counts the attempt and registers the lease (``lua/claim.lua``).

A script cannot block, so a worker with room waits for news instead: Redis' key tracking
(``CLIENT TRACKING ... BCAST``) tells it when one of its lists changed, within a millisecond and for
every priority at once, and costs nothing while the queue is idle. A slow timer covers the news
that a failing connection swallows.

A job outlives its connection: it runs on through a reconnect and is settled when it ends, over a
connection of its own.
"""

from __future__ import annotations

import binascii
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kombu import transport as kombu_transports
from kombu.log import get_logger
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import ResponseError

from llorch_worker.broker import claims, dead_letters, queues
from llorch_worker.broker.claims import Claim, ClaimTerms
from llorch_worker.broker.connection import is_out_of_memory
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.contract import Fault, InvalidRequest

logger = get_logger(__name__)

LOOK_AGAIN_S = 1.0
"""How long a job may lie unseen when the news of it was lost, or a suspect when its turn comes."""
MOST_JOBS_A_CLAIM = 64
TRACKING_CHANNEL = "__redis__:invalidate"

_NO_ENVELOPE = (
    binascii.Error, LookupError, TypeError, ValueError, AttributeError, RecursionError
)  # fmt: skip


@lru_cache
def _places(consumed: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Where the jobs of the ``consumed`` queues wait: their lists, and that of the suspects."""
    return tuple(queues.lists(consumed)), queues.suspects(queues.model_of(consumed[0]))


class ClaimQoS(kombu_redis.QoS):
    """Settles claims where kombu keeps a register of unacknowledged messages.

    Messages of other queues (replies to ``inspect``) are kombu's as ever.
    """

    channel: ClaimChannel

    def can_consume(self) -> bool:
        """Room for another job: what runs on through a reconnect counts too."""
        if self.channel.consumes_jobs:
            return not self.prefetch_count or len(HELD_CLAIMS) < self.prefetch_count
        return bool(super().can_consume())

    def append(self, message: Any, delivery_tag: str) -> None:
        if delivery_tag in self.channel.delivered:
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        if not self._settle(delivery_tag, requeue=False):
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not self._settle(delivery_tag, requeue=requeue):
            super().reject(delivery_tag, requeue=requeue)

    def restore_unacked(self, client: Any = None) -> None:  # noqa: ARG002 - kombu's signature
        self._flush()
        # The latest first: each goes to the head, so the earliest ends up in front.
        for delivery_tag in reversed(tuple(self._delivered)):
            self.reject(delivery_tag, requeue=True)
        self._delivered.clear()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Leases and their sweep take the place of kombu's visibility timeout."""

    def _settle(self, delivery_tag: str, *, requeue: bool) -> bool:
        """Ends the claim; ``False`` if this message was not claimed."""
        claim = self.channel.delivered.pop(delivery_tag, None)
        if claim is None:
            return False
        if not self.can_consume():
            # There will be room, and nobody brings news of what waits already.
            self.channel.look_again()
        try:
            if not HELD_CLAIMS.has_ended(claim):
                with self.channel.conn_or_acquire() as client:
                    if requeue:
                        claims.hand_back(client, claim)
                    else:
                        claims.end(client, claim, self.channel.terms)
        finally:
            # Where Redis is away the lease lapses: an ended job's is swept, another's job comes
            # back. In neither case may the slot stay taken.
            HELD_CLAIMS.discard(claim)
            virtual.QoS.ack(self, delivery_tag)
        return True


class ClaimChannel(kombu_redis.Channel):
    """Claims jobs from ``llorch.*`` queues; other queues work as ever."""

    QoS = ClaimQoS

    terms: ClaimTerms
    worker: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.delivered: dict[str, Claim] = {}
        self._tracked_socket: Any = None
        self._refused = False
        self._kept_parameters: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    @property
    def consumes_jobs(self) -> bool:
        active = self.active_queues
        return bool(active) and all(map(queues.is_job_queue, active))

    def look_again(self) -> None:
        """Claims at the next turn of the loop, news or not."""
        if self.consumes_jobs:
            self._in_poll = None

    def bury(self, delivery_tag: str, reason: str) -> None:
        """Keeps the message, which cannot become a task, as a dead letter."""
        claim = self.delivered.get(delivery_tag)
        if claim is not None:
            with self.conn_or_acquire() as client:
                dead_letters.bury(client, claim, reason)

    def _size(self, queue: str) -> int:
        # No transaction: a server at maxmemory refuses any, also one that only reads.
        with self.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for name in queues.lists([queue]):
                pipe.llen(name)
            return sum(pipe.execute())

    def _queue_bind(self, exchange: str, *args: Any) -> None:
        try:
            super()._queue_bind(exchange, *args)
        except ResponseError as error:
            if not is_out_of_memory(error):
                raise
            # The tables are for producers; what this worker hears of inspect and revoke comes by
            # pub/sub. Let out, this would keep workers from starting that would make room.
            logger.warning("Redis is at its maxmemory: not bound to %s", exchange)

    # What kombu calls BRPOP: start to wait, and read what came ------------------------------------

    def _brpop_start(self, timeout: float | None = None) -> None:
        if not self.consumes_jobs:
            super()._brpop_start(timeout)
            return
        # Listen first, then look: what is pushed in between is news. What is older is seen now.
        self._track()
        self._look()

    def _brpop_read(self, **options: Any) -> Any:
        if not self.consumes_jobs:
            return super()._brpop_read(**options)
        # Not waiting meanwhile: where the news cannot be read the next turn begins anew.
        self._in_poll = None
        self._look()
        return True

    def _look(self) -> None:
        self._read_news()
        # Waiting again, also where there will be no more room: kombu then stops polling until there
        # is, while it closes a connection that speaks although nothing is expected of it. Before
        # the claim, because a delivery that ends at once asks to look again.
        self._in_poll = self.client.connection
        # Nor is an answer overdue: of a BRPOP, as mingle sends one, kombu would drop the connection
        # after a while, and again every 25 s.
        self._brpop_sent_at = None
        self._claim_and_deliver()

    def _read_news(self) -> None:
        connection = self.client.connection
        try:
            while connection.can_read(timeout=0):
                connection.read_response()
        except self.connection_errors:
            # Closed, it is opened and registered anew at the next turn of the loop.
            connection.disconnect()
            raise

    def _track(self) -> None:
        connection = self.client.connection
        if self._tracked_socket is connection._sock:
            return
        # One prefix holds all lists of a model; Redis refuses overlapping ones.
        prefix = queues.normal_queue(queues.model_of(self.active_queues[0]))
        client_id = _call(connection, "CLIENT", "ID")
        while not isinstance(client_id, int):
            # The answer to a BRPOP that kombu left here: mingle waited on this channel for replies.
            client_id = connection.read_response()
        _call(
            connection,
            *("CLIENT", "TRACKING", "ON", "REDIRECT", client_id, "BCAST", "PREFIX", prefix),
        )
        _call(connection, "SUBSCRIBE", TRACKING_CHANNEL)
        self._tracked_socket = connection._sock

    def _claim_and_deliver(self) -> None:
        consumed = tuple(self.active_queues)
        lists, suspects = _places(consumed)
        room = MOST_JOBS_A_CLAIM
        if self.qos.prefetch_count:
            room = min(room, self.qos.prefetch_count - len(HELD_CLAIMS))
        try:
            with self.conn_or_acquire() as client:
                taken = claims.claim(
                    client,
                    lists=lists,
                    suspects=suspects,
                    held=HELD_CLAIMS.all(),
                    limit=room,
                    worker=self.worker,
                    terms=self.terms,
                )
        except ResponseError as error:
            # A server that cannot save, or became a replica, may take writes again: let out, this
            # would end the worker.
            if not self._refused:
                logger.error("cannot claim jobs, will retry: %s", error)
            self._refused = True
            return
        if self._refused:
            logger.info("claiming jobs again")
            self._refused = False
        # Held before any is delivered: whatever a delivery does, the leases are renewed.
        for claim in taken:
            HELD_CLAIMS.add(claim)
        waiting = deque(taken)
        try:
            while waiting:
                self._deliver_claim(waiting.popleft(), consumed)
        finally:
            # Where a delivery failed nobody will settle what came after it: the leases must lapse.
            for claim in waiting:
                HELD_CLAIMS.discard(claim)

    def _deliver_claim(self, claim: Claim, consumed: Sequence[str]) -> None:
        envelope = self._envelope(claim.message)
        if envelope is None:
            self._bury_unreadable(claim)
            return
        # A tag of our own: what a producer wrote may be another message's too.
        tag = f"{claim.job_id}/{claim.fence}"
        envelope["properties"] |= {"delivery_tag": tag}
        self.delivered[tag] = claim
        # What came from this worker's own queue, or from the suspects, is of a shared one now.
        queue = queues.queue_of(claim.list_key)
        self.connection._deliver(envelope, queue if queue in consumed else consumed[0])

    def _bury_unreadable(self, claim: Claim) -> None:
        size = len(claim.message)
        logger.error("refused an entry of %d bytes: it is no message", size)
        fault = Fault(field="message", rule="must be a Celery message", got=f"{size} bytes")
        try:
            with self.conn_or_acquire() as client:
                dead_letters.bury(client, claim, "malformed")
                claims.fail(client, claim, InvalidRequest.from_faults([fault]), self.terms)
                claims.end(client, claim, self.terms)
        finally:
            # Where Redis is away the lease lapses, and the entry is judged again.
            HELD_CLAIMS.discard(claim)

    def _envelope(self, raw: bytes) -> dict[str, Any] | None:
        """The message as kombu's envelope, its body decoded; None where it is no message."""
        try:
            envelope: Any = loads(bytes_to_str(raw))
            # What delivery and acknowledgement will read, read once where failing is harmless.
            properties, headers = envelope["properties"], envelope.get("headers")
            info = properties["delivery_info"]
            names = (properties["delivery_tag"], info["exchange"], info["routing_key"])
            body = envelope.get("body")
            if body:
                body = self.decode_body(body, properties.get("body_encoding"))
        except _NO_ENVELOPE:
            return None
        objects = (envelope, properties, headers or {})
        if not all(isinstance(each, dict) for each in objects):
            return None
        if not all(isinstance(name, str) for name in names):
            return None
        return {**envelope, "body": body, "properties": {**properties, "body_encoding": None}}

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection is None or self.connection.client is None:
            return dict(self._kept_parameters)
        # News comes as a pub/sub message in RESP2 and as a push in RESP3; we read the former.
        parameters: dict[str, Any] = super()._connparams(asynchronous) | {"protocol": 2}
        if not asynchronous:
            self._kept_parameters = parameters
        return parameters

    def close(self) -> None:
        if self.consumes_jobs or not self.active_queues:
            # kombu would wait for the reply to a pending BRPOP; there is none.
            self._in_poll = None
        super().close()


class ClaimTransport(kombu_redis.Transport):
    """kombu's Redis transport with channels that claim."""

    Channel = ClaimChannel

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        super().register_with_event_loop(connection, loop)
        # Celery cancels what a connection registered before it connects again.
        loop.call_repeatedly(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        for channel in tuple(self.cycle._channels):
            channel.look_again()


class SentinelClaimChannel(ClaimChannel, kombu_redis.SentinelChannel):
    """Claims from the master that Sentinel names."""


class SentinelClaimTransport(ClaimTransport):
    """As :class:`ClaimTransport`, through Sentinel."""

    default_port = kombu_redis.SentinelTransport.default_port
    Channel = SentinelClaimChannel


_TRANSPORTS = {
    "redis": ClaimTransport,
    "rediss": ClaimTransport,
    "sentinel": SentinelClaimTransport,
}


def keep_claims(connection: Any) -> None:
    """Before a lost connection is cleaned up: what it delivered stays with this worker."""
    for channel in connection.transport.channels:
        channel.do_restore = False


def install(terms: ClaimTerms, worker: str) -> None:
    """Makes the Redis schemes mean these transports, in this process from now on.

    ``terms`` and ``worker``, the name to claim under, go to every channel.

    An alias rather than the ``broker_transport`` setting, because kombu shows the setting's value
    as the scheme of the URL in banners, logs and ``inspect``.
    """
    ClaimChannel.terms, ClaimChannel.worker = terms, worker
    for scheme, transport in _TRANSPORTS.items():
        kombu_transports.TRANSPORT_ALIASES[scheme] = f"{__name__}:{transport.__name__}"
        kombu_transports._transport_cache.pop(scheme, None)


def _call(connection: Any, *command: Any) -> Any:
    # No health check first: its PING would take the answer to a BRPOP that is still due.
    connection.send_command(*command, check_health=False)
    return connection.read_response()
