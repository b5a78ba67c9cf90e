"""A kombu transport whose consumers claim jobs instead of popping them.

Stock producers push to the same lists. kombu's own Redis transport pops a message with BRPOP,
registers it afterwards, and loses it if the worker dies in between. This one claims it with one
script that pops, counts the attempt and registers the lease (``lua/claim.lua``).

A script cannot block, so a worker with room looks first, and then waits until a bell of its queues
rings: see :mod:`doorbell`. It looks again every few seconds in any case.

A job outlives its connection: it keeps running through a reconnect and is settled over another
connection when it ends.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

from kombu import transport as kombu_transports
from kombu.log import get_logger
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker import claims, dead_letters, keys, placement, queues, watch
from llorch_worker.broker.claims import Claim, ClaimTerms, Taken
from llorch_worker.broker.connection import is_refused_write
from llorch_worker.broker.doorbell import Doorbell
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.limits import LimitedConnection, LimitedSSLConnection
from llorch_worker.broker.message import ENQUEUED_AT, read_envelope
from llorch_worker.broker.redis_outage import RedisOutage
from llorch_worker.broker.scripts import run_script
from llorch_worker.broker.sentinel_channel import SentinelChannel
from llorch_worker.broker.stopped_queues import StoppedQueues
from llorch_worker.broker.unheard_claims import UNHEARD_CLAIMS
from llorch_worker.contract import Fault, InvalidRequest

logger = get_logger(__name__)

_SETTLING = RedisOutage("cannot settle jobs", "settling jobs again")

LOOK_AGAIN_S = 1.0
"""A look that Redis refused is repeated after this time. A worker times jobs that are due within
it; for later ones, whoever watches the queues rings."""
WAIT_S = 5.0
"""How long an idle worker waits for a ring before it looks."""
JITTER = 0.2
"""Workers that started together must not all look at once."""
MOST_JOBS_A_CLAIM = 64
MOST_URGENT_JOBS = 4
"""How many high jobs a worker holds beyond its room, while it has others to preempt."""


class ClaimQoS(kombu_redis.QoS):
    """Settles claims, in place of kombu's register of unacknowledged messages.

    kombu still handles the messages of other queues (replies to ``inspect``).
    """

    channel: ClaimChannel

    def can_consume(self) -> bool:
        """Whether there is room for another job. Jobs that run through a reconnect count too."""
        if self.channel.consumes_jobs:
            return not self.is_full or self.urgent_room > 0
        return bool(super().can_consume())

    @property
    def is_full(self) -> bool:
        """Whether only high jobs may come, to preempt others."""
        return bool(self.prefetch_count) and len(HELD_CLAIMS) >= self.prefetch_count

    @property
    def urgent_room(self) -> int:
        """How many high jobs may come beyond the room for all."""
        held = HELD_CLAIMS.all()
        high = sum(queues.is_high(claim.list_key) for claim in held)
        most = self.prefetch_count + MOST_URGENT_JOBS
        # A high job preempts no other high one.
        return max(0, min(most - len(held), self.prefetch_count - high))

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
        try:
            if not HELD_CLAIMS.has_ended(claim):
                with self.channel.conn_or_acquire() as client:
                    if requeue:
                        self._hand_back(client, claim)
                    else:
                        claims.end(client, claim, self.channel.terms)
            _SETTLING.over()
        except (NoConnection, NoReply) as error:
            # The lease lapses, and the sweep settles the job.
            _SETTLING.failed(error)
        finally:
            # The slot is freed in any case.
            HELD_CLAIMS.discard(claim)
            virtual.QoS.ack(self, delivery_tag)
            if ClaimChannel.consuming is not None:
                ClaimChannel.consuming.note_room()
        return True

    def _hand_back(self, client: Any, claim: Claim) -> None:
        terms = self.channel.terms
        # Later, another worker may have ended the job, and what Redis knew of it may have expired.
        known_s = terms.lease_ms / 1e3 + terms.result_ttl_s
        if (
            not claims.hand_back(client, claim)
            and HELD_CLAIMS.unrenewed_s(claim) < known_s
            and claims.restore(client, claim)
        ):
            logger.warning("Redis lost its data; job %s is queued again", claim.job_id)


class ClaimChannel(kombu_redis.Channel):
    """Claims jobs from ``llorch.*`` queues. Other queues work as in kombu."""

    QoS = ClaimQoS
    connection_class = LimitedConnection
    connection_class_ssl = LimitedSSLConnection

    terms: ClaimTerms
    worker: str
    consuming: ClassVar[ClaimChannel | None] = None
    """The worker's channel for jobs now. It may not be the one that a job came through."""
    consumes_jobs = False
    """Whether this is the worker's channel for jobs, also while all its queues are cancelled."""
    allowance: Callable[[], int] = staticmethod(lambda: MOST_JOBS_A_CLAIM)
    """The most jobs to claim now. If that is none, whoever sets it calls :meth:`look_again`."""
    on_repeated: Callable[[str], None] = staticmethod(lambda _job_id: None)
    """Called with the id of a message that was dropped because its job had ended."""
    place: Callable[[], str] = staticmethod(lambda: "")
    """This worker's queue, if jobs may be placed with it; see :mod:`placement`."""
    # Of the class, because a channel may end with its connection while Redis refuses.
    _claiming: ClassVar = RedisOutage("cannot claim jobs", "claiming jobs again")
    _binding: ClassVar = RedisOutage("cannot keep queues for replies", "keeping them again")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.delivered: dict[str, Claim] = {}
        self._model = ""
        self._doorbell = Doorbell()
        self._waited_in_vain = False
        self._waits_without_room = False
        self._exists = False
        """Whether a key was there at the end of a wait in which no bell rang."""
        self._stopped = StoppedQueues()
        self._not_before_s = 0.0
        self._kept_parameters: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def basic_consume(self, queue: str, *args: Any, **kwargs: Any) -> Any:
        tag = super().basic_consume(queue, *args, **kwargs)
        if queues.is_job_queue(queue):
            ClaimChannel.consuming = self
            self.consumes_jobs, self._model = True, queues.model_of(queue)
            # kombu takes a connection for dead that gets no reply in this time and some more.
            self.brpop_timeout = WAIT_S * (1 + JITTER)
            self.look_again()
        return tag

    def look_again(self) -> None:
        """Claims at the next turn of the loop, with or without a ring."""
        if self.consumes_jobs:
            self._not_before_s = 0.0
            self._waited_in_vain = False
            self._in_poll = None

    def note_room(self) -> None:
        """Claims jobs of all priorities, if the worker waited for high ones alone."""
        if self._waits_without_room and not self.qos.is_full:
            self._waits_without_room = self._waited_in_vain = False
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
        names = [self._q_for_pri(queue, step) for step in self.priority_steps]
        if queues.is_job_queue(queue):
            names = queues.lists([queue])
        with self.conn_or_acquire() as client:
            return int(run_script(client, "lengths", [], names))

    def _purge(self, queue: str) -> int:
        if not queues.is_job_queue(queue):
            return int(super()._purge(queue))
        with self.conn_or_acquire() as client:
            return int(run_script(client, "purge", [], queues.lists([queue])))

    def _queue_bind(self, exchange: str, *args: Any) -> None:
        try:
            super()._queue_bind(exchange, *args)
        except ResponseError as error:
            if not is_refused_write(error):
                raise
            # Only producers use the tables; workers receive inspect and revoke by pub/sub. Raising
            # the error would end the worker, and only workers can make room at maxmemory.
            logger.debug("not bound to %s: %s", exchange, error)

    def maybe_refresh_binding_expiry(self) -> None:
        """Like kombu's, which logs a traceback each second while Redis refuses."""
        try:
            super().maybe_refresh_binding_expiry()
        except ResponseError as error:
            self._binding.failed(error)
        else:
            self._binding.over()

    def get_table(self, exchange: str) -> list[tuple[str, ...]]:
        """The queues that take replies; also those of apps with kombu's option ``sep=":"``, as
        Celery's documentation shows it. One of them would otherwise keep all replies back."""
        parts = (
            each if len(each) == 3 else tuple(each[0].split(":"))
            for each in super().get_table(exchange)
        )
        return [each for each in parts if len(each) == 3]

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection is None or self.connection.client is None:
            return dict(self._kept_parameters)
        # In RESP3 other replies may come before that of a BLPOP.
        parameters: dict[str, Any] = super()._connparams(asynchronous) | {"protocol": 2}
        if not asynchronous:
            # A copy: callers take out what they do not pass on.
            self._kept_parameters = dict(parameters)
        return parameters

    def _basic_cancel(self, consumer_tag: str) -> Any:
        cancelled = super()._basic_cancel(consumer_tag)
        self._stop_waiting()
        return cancelled

    # In place of kombu's BRPOP: look, wait for a ring, read it, look again ------------------------

    def _brpop_start(self, timeout: float | None = None) -> None:
        if not self.consumes_jobs:
            super()._brpop_start(timeout)
            return
        self._look_and_wait()
        while self._doorbell.is_rung(self.client.connection):
            # The poll before the next turn of the loop may not tell of this reply.
            self._brpop_read()
            self._look_and_wait()

    def _look_and_wait(self) -> None:
        connection = self.client.connection
        if self._doorbell.waits(connection):
            # A timer or a command asks for a look. A worker claims only while it does not wait, so
            # one that has no room takes no ring.
            with self.conn_or_acquire() as client:
                self._doorbell.leave(connection, client)
        if time.monotonic() < self._not_before_s:
            return
        waited_in_vain, self._waited_in_vain = self._waited_in_vain, False
        if not (waited_in_vain and self._nothing_waits()) and not self._look():
            self._stop_waiting()
            return
        if connection._sock is None:
            return
        self._waits_without_room = self.qos.is_full
        if self._waits_without_room:
            self._stop_waiting()
        if not self._doorbell.waits(connection):
            self._doorbell.wait(connection, self._bells(), _wait_s())
        self._in_poll = connection
        self._brpop_sent_at = time.monotonic()

    def _brpop_read(self, **options: Any) -> Any:
        if not self.consumes_jobs:
            return super()._brpop_read(**options)
        # The next turn of the loop looks.
        self._in_poll = None
        try:
            self._waited_in_vain = not self._doorbell.read(self.client.connection)
        except ResponseError as error:
            self._pause(error)
        return True

    def _nothing_waits(self) -> bool:
        """Asks in one command, which an idle worker repeats for ever."""
        mine = [] if self.qos.is_full else [
            queues.suspects(self._model), queues.scheduled(self._model)
        ]  # fmt: skip
        consumed = self._claimable()
        with self.conn_or_acquire() as client:
            place = "" if self.qos.is_full else self._place_among(self.active_queues)
            if place:
                placement.note_idle(client, place, len(HELD_CLAIMS.running()))
            self._exists = bool(consumed and client.exists(*mine, *queues.lists(consumed)))
        return not self._exists

    def _claimable(self) -> list[str]:
        """The queues that it may claim from now."""
        going = (queue for queue in self.active_queues if queue not in self._stopped)
        consumed = queues.ordered(going)
        return list(filter(queues.is_high, consumed)) if self.qos.is_full else consumed

    def _bells(self) -> list[str]:
        """The bells of those queues."""
        shared = keys.full_bell if self.qos.is_full else keys.bell
        return [
            (keys.bell if queues.WORKER_MARK in name else shared)(name)
            for name in self._claimable()
        ]

    def _place_among(self, consumed: list[str]) -> str:
        """:attr:`place`, unless this worker takes no jobs that wait for any worker."""
        return self.place() if queues.normal_queue(self._model) in consumed else ""

    def _look(self) -> bool:
        """Claims and delivers jobs; whether there is room left, and nothing but a ring or a timer
        brings more."""
        exists, self._exists = self._exists, False
        if self._stopped:
            self._find_stopped()
        consumed = self._claimable()
        if not consumed or not (most := self.allowance()):
            return False
        if self.qos.is_full:
            most = min(most, self.qos.urgent_room)
        elif self.qos.prefetch_count:
            most = min(most, self.qos.prefetch_count - len(HELD_CLAIMS))
        taken = self._claim(consumed, most)
        if taken is None:
            return False
        if exists and not taken.claims:
            self._find_stopped()
        self._deliver_claims(taken.claims, self.active_queues)
        for job_id in taken.repeated:
            self.on_repeated(job_id)
        # Redis had forgotten the script, and a ring ended the wait before the look was made.
        again_s = 0.0 if self._doorbell.has_rung else taken.look_again_s
        if again_s is not None and again_s < LOOK_AGAIN_S:
            self.connection.look_again_in(again_s)
        return again_s != 0 and self.qos.can_consume() and bool(self._bells() and self.allowance())

    def _claim(self, consumed: list[str], most: int) -> Taken | None:
        """None if Redis refuses. If there will probably be room left, it begins to wait."""
        connection = self.client.connection
        run: Callable[..., Any] = run_script
        rung, self._doorbell.has_rung = self._doorbell.has_rung, False
        if most > 1 and not self.qos.is_full and connection._sock is not None:
            wait = self._doorbell.run_and_wait
            run = partial(wait, connection, self._bells(), _wait_s())
        try:
            with self.conn_or_acquire() as client, UNHEARD_CLAIMS.around_claim(client, self.worker):
                taken = claims.claim(
                    client,
                    consumed=consumed,
                    held=HELD_CLAIMS.running(),
                    limit=most,
                    worker=self.worker,
                    terms=self.terms,
                    rung=rung,
                    urgent=self.qos.is_full,
                    place=self._place_among(consumed),
                    run=run,
                )
        except ResponseError as error:
            # A server that cannot save, or became a replica, may accept writes again later.
            # Raising the error would end the worker.
            self._pause(error)
            return None
        self._claiming.over()
        return taken

    def _pause(self, error: ResponseError) -> None:
        """Looks again after a while, because Redis refused."""
        if "WRONGTYPE" not in str(error) or not self._find_stopped():
            self._claiming.failed(error)
        self._not_before_s = time.monotonic() + LOOK_AGAIN_S
        self.connection.look_again_in(LOOK_AGAIN_S)

    def _find_stopped(self) -> bool:
        with self.conn_or_acquire() as client:
            found = self._stopped.look(client, self.active_queues)
        if found:
            self.connection.look_again_in(WAIT_S)
        return found

    def _stop_waiting(self) -> None:
        """Ends the wait of a worker that takes fewer jobs from now on. A ring goes on."""
        connection = self.client.connection
        if not self.consumes_jobs or connection is None or not self._doorbell.waits(connection):
            return
        self._in_poll = None
        try:
            with self.conn_or_acquire() as client:
                # A claim that filled the worker has left already.
                if not self.qos.is_full and (place := self.place()):
                    placement.leave(client, place)
                if self._doorbell.leave(connection, client):
                    watch.pass_ring_on(client, self._model, self.active_queues)
        except RedisError as error:
            logger.warning("a ring may be lost, and costs a second: %s", error)

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


def _wait_s() -> float:
    return WAIT_S * random.uniform(1 - JITTER, 1 + JITTER)


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
        # What asked for a look before belonged to a connection that is lost.
        self._next_look = None

    def look_again_in(self, seconds: float) -> None:
        """Claims after ``seconds``, with or without a ring."""
        if self._next_look is not None:
            self._next_look.cancel()
        if self._loop is not None:
            self._next_look = self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        for channel in tuple(self.cycle._channels):
            channel.look_again()


class SentinelClaimChannel(ClaimChannel, SentinelChannel):
    """A channel that claims from the master that Sentinel names."""

    connection_class = SentinelChannel.connection_class
    connection_class_ssl = SentinelChannel.connection_class_ssl


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
