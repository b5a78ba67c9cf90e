"""A kombu channel that claims jobs, and waits for more.

A script cannot block, so a worker with room looks first, and then waits until a bell of its queues
rings: see :mod:`.doorbell`. It looks again every few seconds in any case.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty
from typing import Any, ClassVar

from kombu.log import get_logger
from kombu.transport import redis as kombu_redis
from redis.exceptions import RedisError, ResponseError

from llorch_worker.broker import (
    claim_delivery,
    claims,
    dead_letters,
    keys,
    placement,
    queues,
    watch,
)
from llorch_worker.broker.body import is_exit
from llorch_worker.broker.claim_qos import ClaimQoS
from llorch_worker.broker.claims import Claim, ClaimRequest, ClaimTerms, Taken
from llorch_worker.broker.connection import is_refused_write
from llorch_worker.broker.doorbell import Doorbell
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.limits import LimitedConnection, LimitedSSLConnection
from llorch_worker.broker.redis_outage import RedisOutage
from llorch_worker.broker.scripts import run_script

logger = get_logger(__name__)

LOOK_AGAIN_S = 1.0
"""A look that Redis refused is repeated after this time."""
WAIT_S = 5.0
"""How long an idle worker waits for a ring before it looks."""
JITTER = 0.2
"""Workers that started together must not all look at once."""
MOST_JOBS_A_CLAIM = 64


class ClaimChannel(kombu_redis.Channel):
    """Claims jobs from ``llorch.*`` queues. Other queues work as in kombu."""

    QoS = ClaimQoS
    Message = claim_delivery.DeliveredMessage
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
    _claiming: ClassVar = RedisOutage("claim jobs")
    _binding: ClassVar = RedisOutage("keep queues for replies")
    _unheard: ClassVar[ClaimRequest | None] = None
    """The last claim, until its reply has come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.delivered: dict[str, Claim] = {}
        self._model = ""
        self._doorbell = Doorbell()
        self._waited_in_vain = False
        self._waits_without_room = False
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

    def lapse(self, delivery_tag: str) -> None:
        """Has the job of a message run again after the next sweep, if it is not settled. The
        attempt counts."""
        claim = self.delivered.get(delivery_tag)
        if claim is not None:
            with self.conn_or_acquire() as client:
                claims.lapse(client, claim, max_attempts=self.terms.max_attempts)

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
            _, *heads = run_script(client, "heads", [], names)
        # A key of another type has -1.
        return sum(max(0, jobs) for _, jobs, _ in heads)

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

    def _refresh_bindings(self, consumed: list[str]) -> None:
        # A channel without such queues asks Redis nothing, so that its success means nothing.
        super()._refresh_bindings(consumed)
        self._binding.over()

    def get_table(self, exchange: str) -> list[tuple[str, ...]]:
        """The queues that take replies; also those of apps with kombu's option ``sep=":"``, as
        Celery's documentation shows it. One of them would otherwise keep all replies back."""
        parts = (
            each if len(each) == 3 else tuple(each[0].split(":"))
            for each in super().get_table(exchange)
        )
        return [each for each in parts if len(each) == 3]

    def _receive_one(self, c: Any) -> Any:
        """Like kombu's, but what it cannot read of a control message ends no worker. All workers
        hear the same one."""
        try:
            return super()._receive_one(c)
        except (RedisError, OSError, Empty):
            raise
        except BaseException as error:
            if is_exit(error):
                raise
            logger.error("ignored a control message that cannot be read")
            raise Empty from None

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
        wait_s = WAIT_S * random.uniform(1 - JITTER, 1 + JITTER)
        self._doorbell.wait(connection, self._bells(), wait_s)
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
        mine = [] if self.qos.is_full else [queues.suspects(self._model)]
        consumed = self._claimable()
        with self.conn_or_acquire() as client:
            place = "" if self.qos.is_full else self._place_among(self.active_queues)
            if place:
                placement.note_idle(client, place, len(HELD_CLAIMS.running()))
            return not (consumed and client.exists(*mine, *queues.lists(consumed)))

    def _claimable(self) -> list[str]:
        """The queues that it may claim from now."""
        consumed = queues.ordered(self.active_queues)
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
        claim_delivery.deliver(self, taken.claims, self.active_queues)
        for job_id in taken.repeated:
            self.on_repeated(job_id)
        again_s = taken.look_again_s
        if again_s is not None:
            self.connection.look_again_in(again_s)
        return again_s != 0 and self.qos.can_consume() and bool(self._bells() and self.allowance())

    def _claim(self, consumed: list[str], most: int) -> Taken | None:
        """None if Redis refuses."""
        try:
            with self.conn_or_acquire() as client:
                request = ClaimChannel._unheard or ClaimRequest(
                    models=(self._model,),
                    queues=tuple(consumed),
                    limit=most,
                    worker=self.worker,
                    held=HELD_CLAIMS.running(),
                    urgent=self.qos.is_full,
                    place=self._place_among(consumed),
                )
                ClaimChannel._unheard = replace(request, sent_before=True)
                taken = claims.claim(client, request, self.terms)
        except ResponseError as error:
            # A server that cannot save, or became a replica, may accept writes again later.
            # Raising the error would end the worker.
            ClaimChannel._unheard = None
            self._pause(error)
            return None
        ClaimChannel._unheard = None
        self._claiming.over()
        return taken

    def _pause(self, error: ResponseError) -> None:
        """Looks again after a while, because Redis refused."""
        self._claiming.failed(error)
        self._not_before_s = time.monotonic() + LOOK_AGAIN_S
        self.connection.look_again_in(LOOK_AGAIN_S)

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
