"""A kombu transport whose consumers claim jobs instead of popping them.

Stock producers push to the same lists. kombu's own Redis transport pops a message with BRPOP,
registers it afterwards, and loses it if the worker dies in between. This one claims it with one
script that pops, counts the attempt and registers the lease (``lua/claim.lua``).

A script cannot block, so a worker with room waits for news of its lists: see :mod:`queue_news`. A
slow timer covers news that a failing connection lost.

A job outlives its connection: it keeps running through a reconnect and is settled over another
connection when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kombu import transport as kombu_transports
from kombu.log import get_logger
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from redis.exceptions import ResponseError

from llorch_worker.broker import claims, dead_letters, queues
from llorch_worker.broker.claims import Claim, ClaimTerms
from llorch_worker.broker.connection import is_out_of_memory
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.message import ENQUEUED_AT, read_envelope
from llorch_worker.broker.queue_news import QueueNews
from llorch_worker.broker.unheard_claims import UNHEARD_CLAIMS
from llorch_worker.broker.waiting import lengths
from llorch_worker.contract import Fault, InvalidRequest

logger = get_logger(__name__)

LOOK_AGAIN_S = 1.0
"""The longest time that a job waits if the news of it was lost, or a suspect once it may run."""
MOST_JOBS_A_CLAIM = 64


class ClaimQoS(kombu_redis.QoS):
    """Settles claims, in place of kombu's register of unacknowledged messages.

    kombu still handles the messages of other queues (replies to ``inspect``).
    """

    channel: ClaimChannel

    def can_consume(self) -> bool:
        """Whether there is room for another job. Jobs that run through a reconnect count too."""
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
        # Latest first: each goes to the head, so the earliest ends up in front.
        for delivery_tag in reversed(tuple(self._delivered)):
            self.reject(delivery_tag, requeue=True)
        self._delivered.clear()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: leases and their sweep replace kombu's visibility timeout."""

    def _settle(self, delivery_tag: str, *, requeue: bool) -> bool:
        """Ends the claim; ``False`` if this message was not claimed."""
        claim = self.channel.delivered.pop(delivery_tag, None)
        if claim is None:
            return False
        if not self.can_consume():
            # This makes room, and jobs that already wait cause no news.
            self.channel.look_again()
        try:
            if not HELD_CLAIMS.has_ended(claim):
                with self.channel.conn_or_acquire() as client:
                    if requeue:
                        claims.hand_back(client, claim)
                    else:
                        claims.end(client, claim, self.channel.terms)
        finally:
            # If Redis is away, the lease lapses and the sweep settles the job. The slot is freed
            # in any case.
            HELD_CLAIMS.discard(claim)
            virtual.QoS.ack(self, delivery_tag)
        return True


class ClaimChannel(kombu_redis.Channel):
    """Claims jobs from ``llorch.*`` queues. Other queues work as in kombu."""

    QoS = ClaimQoS

    terms: ClaimTerms
    worker: str
    consumes_jobs = False
    """Whether this is the worker's channel for jobs, also while all its queues are cancelled."""
    allowance: Callable[[], int] = staticmethod(lambda: MOST_JOBS_A_CLAIM)
    """The most jobs to claim now. If that is none, whoever sets it calls :meth:`look_again`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.delivered: dict[str, Claim] = {}
        self._news = QueueNews()
        self._refused = False
        self._kept_parameters: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def basic_consume(self, queue: str, *args: Any, **kwargs: Any) -> Any:
        tag = super().basic_consume(queue, *args, **kwargs)
        if queues.is_job_queue(queue):
            self.consumes_jobs = True
            self.look_again()
        return tag

    def look_again(self) -> None:
        """Claims at the next turn of the loop, with or without news."""
        if self.consumes_jobs:
            self._in_poll = None

    def refuse(self, delivery_tag: str, reason: str, error: Exception) -> None:
        """Fails the job of a message that cannot become a task, and keeps it as a dead letter."""
        claim = self.delivered[delivery_tag]
        with self.conn_or_acquire() as client:
            dead_letters.refuse(client, claim, reason, error, self.terms)
        HELD_CLAIMS.note_end(claim)

    def close(self) -> None:
        if self.consumes_jobs or not self.active_queues:
            # kombu would wait for the reply to a pending BRPOP, but none is pending.
            self._in_poll = None
        super().close()

    # kombu's interface of a Redis channel -----------------------------------------------------

    def _size(self, queue: str) -> int:
        with self.conn_or_acquire() as client:
            return sum(lengths(client, queues.lists([queue])))

    def _queue_bind(self, exchange: str, *args: Any) -> None:
        try:
            super()._queue_bind(exchange, *args)
        except ResponseError as error:
            if not is_out_of_memory(error):
                raise
            # Only producers use the tables; workers receive inspect and revoke by pub/sub. Raising
            # the error would keep workers from starting, and only they can make room.
            logger.warning("not bound to %s: Redis is at its maxmemory", exchange)

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection is None or self.connection.client is None:
            return dict(self._kept_parameters)
        # News comes as a pub/sub message in RESP2 and as a push in RESP3; we read the former.
        parameters: dict[str, Any] = super()._connparams(asynchronous) | {"protocol": 2}
        if not asynchronous:
            self._kept_parameters = parameters
        return parameters

    # In place of kombu's BRPOP: start to wait, then read what arrived -----------------------------

    def _brpop_start(self, timeout: float | None = None) -> None:
        if not self.consumes_jobs:
            super()._brpop_start(timeout)
            return
        # Listen first, then look: later pushes are news, and earlier ones are seen now.
        self._news.listen(self.client.connection, queues.model_of(self.active_queues[0]))
        self._look()

    def _brpop_read(self, **options: Any) -> Any:
        if not self.consumes_jobs:
            return super()._brpop_read(**options)
        # Cleared first, so that the next turn starts over if the news cannot be read.
        self._in_poll = None
        self._look()
        return True

    def _look(self) -> None:
        connection = self.client.connection
        self._news.read(connection)
        # Wait again even if the claim will fill all room: kombu stops polling until there is room,
        # but closes a connection that receives data while nothing is awaited. This comes before
        # the claim, because a delivery that ends at once asks to look again.
        self._in_poll = connection
        # No reply is overdue. kombu drops a connection whose BRPOP gets no reply in time.
        self._brpop_sent_at = None
        consumed = self.active_queues
        if not consumed or not (most := self.allowance()):
            return
        taken = self._claim(consumed, most)
        self._deliver_claims(taken, consumed)
        if len(taken) == most:
            # More may wait, and jobs that already wait cause no news.
            self.look_again()

    def _claim(self, consumed: list[str], most: int) -> list[Claim]:
        if self.qos.prefetch_count:
            most = min(most, self.qos.prefetch_count - len(HELD_CLAIMS))
        try:
            with self.conn_or_acquire() as client, UNHEARD_CLAIMS.around_claim(client, self.worker):
                taken, look_again_s = claims.claim(
                    client,
                    lists=queues.lists(consumed),
                    model=queues.model_of(consumed[0]),
                    held=HELD_CLAIMS.all(),
                    limit=most,
                    worker=self.worker,
                    terms=self.terms,
                )
        except ResponseError as error:
            # A server that cannot save, or became a replica, may accept writes again later.
            # Raising the error would end the worker.
            if not self._refused:
                logger.error("cannot claim jobs, will retry: %s", error)
            self._refused = True
            return []
        if self._refused:
            logger.info("claiming jobs again")
            self._refused = False
        if look_again_s is not None and look_again_s < LOOK_AGAIN_S:
            self.connection.look_again_in(look_again_s)
        return taken

    def _deliver_claims(self, taken: Iterable[Claim], consumed: list[str]) -> None:
        waiting = deque(taken)
        # Hold all before delivering any, so that their leases are renewed.
        for claim in waiting:
            HELD_CLAIMS.add(claim)
        try:
            while waiting:
                self._deliver_claim(waiting[0], consumed)
                waiting.popleft()
        finally:
            # Nothing settles a claim whose delivery failed, nor those after it: let their leases
            # lapse. A claim that stayed here would be renewed, and fill a slot, for ever.
            for claim in waiting:
                self.delivered.pop(claim.tag, None)
                HELD_CLAIMS.discard(claim)

    def _deliver_claim(self, claim: Claim, consumed: list[str]) -> None:
        envelope = read_envelope(claim.message, self.decode_body)
        if envelope is None:
            self._refuse(claim)
            return
        envelope["properties"] |= {"delivery_tag": claim.tag}
        envelope["properties"]["delivery_info"] |= {"redelivered": not claim.first}
        envelope["headers"] = _headers_of(claim, envelope.get("headers") or {})
        self.delivered[claim.tag] = claim
        # A job from the worker queue or the suspects now belongs to the shared queue.
        queue = queues.queue_of(claim.list_key)
        self.connection._deliver(envelope, queue if queue in consumed else consumed[0])

    def _refuse(self, claim: Claim) -> None:
        """Fails a job whose message kombu could not deliver, and keeps the message."""
        size = len(claim.message)
        logger.error("refused an entry of %d bytes: it is not a message", size)
        fault = Fault(field="message", rule="must be a Celery message", got=f"{size} bytes")
        with self.conn_or_acquire() as client:
            error = InvalidRequest.from_faults([fault])
            dead_letters.refuse(client, claim, dead_letters.MALFORMED, error, self.terms)
        HELD_CLAIMS.discard(claim)


def _headers_of(claim: Claim, headers: dict[str, Any]) -> dict[str, Any]:
    """The message's headers for this claim: Celery need not wait for an ETA that has come, nor end
    a job that expired after its first claim."""
    changed: dict[str, Any] = {}
    if claim.due_ms is not None:
        # Its wait begins with its ETA.
        changed |= {"eta": None, ENQUEUED_AT: claim.due_ms / 1e3}
    if not claim.first:
        changed |= {"expires": None}
    return headers | changed


class ClaimTransport(kombu_redis.Transport):
    """kombu's Redis transport, with channels that claim."""

    Channel = ClaimChannel
    _loop: Any = None
    _next_look: Any = None

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        super().register_with_event_loop(connection, loop)
        self._loop = loop
        # Before Celery reconnects, it cancels what the old connection registered.
        loop.call_repeatedly(LOOK_AGAIN_S, self._look_again)

    def look_again_in(self, seconds: float) -> None:
        """Claims after ``seconds``, with or without news."""
        if self._next_look is not None:
            self._next_look.cancel()
        if self._loop is not None:
            self._next_look = self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        for channel in tuple(self.cycle._channels):
            channel.look_again()


class SentinelClaimChannel(ClaimChannel, kombu_redis.SentinelChannel):
    """A channel that claims from the master that Sentinel names."""


class SentinelClaimTransport(ClaimTransport):
    """:class:`ClaimTransport` through Sentinel."""

    default_port = kombu_redis.SentinelTransport.default_port
    Channel = SentinelClaimChannel


_TRANSPORTS = {
    "redis": ClaimTransport,
    "rediss": ClaimTransport,
    "sentinel": SentinelClaimTransport,
}


def keep_claims(connection: Any) -> None:
    """Keeps the jobs of a lost connection in this worker; call it before the cleanup."""
    for channel in connection.transport.channels:
        channel.do_restore = False


def install(terms: ClaimTerms, worker: str) -> None:
    """Makes the Redis schemes select these transports in this process from now on.

    Every channel claims under the name ``worker`` and on ``terms``. This sets an alias rather than
    ``broker_transport``, because kombu shows that setting's value as the URL's scheme in banners,
    logs and ``inspect``.
    """
    ClaimChannel.terms, ClaimChannel.worker = terms, worker
    for scheme, transport in _TRANSPORTS.items():
        kombu_transports.TRANSPORT_ALIASES[scheme] = f"{__name__}:{transport.__name__}"
        kombu_transports._transport_cache.pop(scheme, None)
