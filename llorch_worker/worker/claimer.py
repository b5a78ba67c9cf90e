"""The thread that claims this worker's jobs: while there is room it looks, and then it waits.

A script cannot block, so it looks first, and then waits for a wake-up of its queues: see
``broker/waiting/wake_ups.py``. It looks again every few seconds in any case.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from celery.utils.log import get_logger
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker import keys, queues
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.connections.time_limits import REPLY_TIMEOUT_S
from llorch_worker.broker.fleet import affinity
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest, ClaimTerms, Kind, Taken
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.wake_ups import WakeUps

logger = get_logger(__name__)

WAIT_S = 5.0
"""How long an idle worker waits for a wake-up before it looks."""
JITTER = 0.2
"""Workers that started together must not all look at once."""
MOST_JOBS_A_CLAIM = 64
MOST_URGENT_JOBS = 4
"""How many high jobs a worker holds beyond its room, while it has others to preempt."""


@dataclass(frozen=True)
class Startable:
    """How many jobs the engine and the rate limit let start now."""

    most: int
    again_s: float | None = None
    """When there may be more, in seconds; None if :meth:`Claimer.look_again` says so."""


@dataclass(frozen=True)
class Room:
    """What a worker may claim now."""

    most: int
    queues: tuple[str, ...] = ()
    urgent: bool = False
    """Whether only high jobs may come, to preempt others."""
    place: str = ""
    """This worker's name in the registry, if jobs may be placed with it."""
    kind: Kind = "any"
    """Of the jobs."""

    @property
    def wake_keys(self) -> tuple[str, ...]:
        """What to wait for if nothing is there."""
        shared = keys.full_wake if self.urgent else keys.wake
        suffix = queues.TEXTS_SUFFIX if self.kind == "texts" else ""
        own = (self.place,) if self.place else ()
        named = (shared(queue + suffix) for queue in self.queues)
        return (*named, *map(keys.wake, own)) if self.most else ()


class Claimer(Repeater):
    """Claims, and hands over what it has claimed: :attr:`arrived`.

    The event loop's thread takes it from there. Before it has, this thread neither looks nor waits,
    so that jobs that this worker cannot take wait in Redis, where others can.

    Methods that the loop calls take no lock, because a signal handler may call them too.
    """

    def __init__(
        self,
        url: str,
        model: Callable[[], str],
        terms: ClaimTerms,
        worker: str,
        *,
        sequences: Callable[[], int],
        startable: Callable[[str], Startable],
        place: Callable[[], str],
        serves: Callable[[], dict[str, Any]],
        on_arrival: Callable[[], object],
        kind: Callable[[], Kind | None] = lambda: "any",
    ) -> None:
        """``model``: whose jobs it claims now, and ``kind``: which of them, if any; call
        :meth:`look_again` after a change. ``sequences``: the most of these to hold.
        ``startable``: how many of a model may start now. ``place``: this
        worker's name in the registry, if jobs may be placed with it, see ``affinity.py``;
        ``serves``: fields of :class:`.ClaimRequest` that say what jobs may need of it;
        ``on_arrival`` is called on this thread."""
        self.queues: tuple[str, ...] = ()
        """Those that Celery consumes now; call :meth:`look_again` after a change."""
        self.prefetch_count = 0
        """The most jobs that Celery lets it hold; 0 for any number."""
        self.arrived: deque[Claim] = deque()
        """Claims that the loop has not taken; call :meth:`wake` when it has taken all."""
        self.repeated: deque[str] = deque()
        """The ids of messages that were dropped because their jobs had ended."""
        # A claim that redis-py sent again would be another: see _unanswered.
        self._redis = connect(url, retries=0, decode=False)
        self._model, self._terms, self._worker = model, terms, worker
        self._kind = kind
        self._sequences = sequences
        self.startable = startable
        self._place, self._serves = place, serves
        self._on_arrival = on_arrival
        self._wake_ups = WakeUps(self._redis)
        self._silent_at_s = 0.0
        """When a wait without a reply is over."""
        self._asked = self._looks = False
        self._look_at_s = float("inf")
        self._lacks_room = False
        self._idle = ("", 0)
        """What Redis knows of it since it last looked."""
        self._waited_for = ""
        """The model for whose jobs it last waited."""
        self._noted_place = ""
        """Where jobs may be placed with it now."""
        self._unanswered: ClaimRequest | None = None
        """The last claim, until its jobs are here."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        super().__init__("claimer", "claim jobs", self._step)

    # On any thread -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Ends the thread's sleep."""
        with suppress(OSError):  # a full socket wakes it already
            self._wake_writer.send(b"\0")

    def look_again(self) -> None:
        """Claims soon, with or without a wake-up."""
        self._asked = True
        self.wake()

    def note_repeated(self, job_id: str) -> None:
        """Call it, from any thread, for a message that was dropped because its job had ended."""
        self.repeated.append(job_id)
        self._on_arrival()

    def begin(self) -> None:
        """Starts the thread, unless it runs."""
        if not self._thread.is_alive() and not self.closing.is_set():
            self.start()

    def note_room(self) -> None:
        """Call it when a claim has been settled."""
        if self._lacks_room and self._kind() is not None:
            self.look_again()

    def close(self) -> None:
        """Ends the thread. What it has claimed last is in :attr:`arrived`."""
        self.queues = ()
        self.closing.set()
        self.wake()
        super().close()

    # On its own ----------------------------------------------------------------------------------

    def _run(self) -> None:
        super()._run()
        with suppress(RedisError):
            if self._unanswered is not None:
                self._look(Room(0))
            # Not Room(0): a full worker's differs, and its wake-up would be lost.
            self._wait(self._room())
        self._wake_ups.close()
        self._redis.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _step(self) -> None:
        if self.arrived or self.repeated:
            self._sleep(hears=False)
            return
        if self._asked:
            self._asked, self._looks = False, True
        try:
            room = self._room()
            if self._looks and (room.most or self._unanswered is not None):
                self._look(room)
                if self.arrived or self.repeated:
                    self._on_arrival()
                    return
            if not (self._looks and room.most) and self._wait(room):
                self._sleep()
        except RedisError as error:
            self._looks = True
            if not isinstance(error, ResponseError):
                self._wake_ups.close()
            raise

    def _room(self) -> Room:
        model, kind = self._model(), self._kind()
        if kind is None:
            return Room(0)
        held = HELD_CLAIMS.of(model, kind)
        limit = self.prefetch_count and min(self.prefetch_count, self._sequences())
        free = limit - len(held)
        is_full = bool(limit) and free <= 0
        own = (name for name in self.queues if queues.model_of(name) == model)
        consumed = tuple(sorted(own, key=queues.is_high, reverse=True))
        most = free if limit else MOST_JOBS_A_CLAIM
        if is_full:
            consumed = tuple(filter(queues.is_high, consumed))
            # A high job preempts no other high one.
            high = sum(queues.is_high(claim.list_key) for claim in held)
            most = min(free + MOST_URGENT_JOBS, limit - high)
        may_start = self.startable(model) if consumed else Startable(0)
        if may_start.again_s is not None:
            self._look_at(may_start.again_s)
        # Not if this worker takes no jobs that wait for any worker.
        takes_any = not is_full and queues.normal_queue(model) in consumed
        place = self._place() if takes_any else ""
        return Room(max(0, min(most, may_start.most)), consumed, is_full, place, kind)

    def _look(self, room: Room) -> None:
        if not self._lacks_room:
            # Its own claim wakes others for the jobs that it leaves.
            self._wake_ups.leave()
        self._look_at_s = float("inf")
        model = self._model()
        request = ClaimRequest(
            model=model,
            queues=room.queues,
            limit=room.most,
            worker=self._worker,
            held=HELD_CLAIMS.running(model),
            urgent=room.urgent,
            place=room.place,
            kind=room.kind,
            **self._serves(),
        )
        if self._unanswered is not None:
            before = self._unanswered
            # Of the same model and kind: the worker may have changed since.
            request = replace(
                request,
                call=before.call,
                model=before.model,
                kind=before.kind,
                sent_before=True,
            )
        self._unanswered, self._noted_place = request, room.place
        self._idle = ("", 0)
        taken = claims.claim(self._redis, request, self._terms)
        self._unanswered = None
        self._keep(taken)

    def _keep(self, taken: Taken) -> None:
        self._looks = taken.look_again_s == 0
        if taken.look_again_s:
            self._look_at(taken.look_again_s)
        # All are held before any is delivered, so that their leases are renewed.
        for claim in taken.claims:
            HELD_CLAIMS.add(claim)
        self.repeated.extend(taken.repeated)
        self.arrived.extend(taken.claims)

    def _look_at(self, after_s: float) -> None:
        self._look_at_s = min(self._look_at_s, time.monotonic() + after_s)

    def _wait(self, room: Room) -> bool:
        """Waits for wake-ups for what it may claim now, and for no others; False if it has to look
        first."""
        self._lacks_room = room.urgent or not room.most
        if self._lacks_room and self._room() != room:
            # Nobody told it of the change, because it was not noted yet that it lacks room.
            self._looks = True
            return False
        wake_keys, before = room.wake_keys, self._wake_ups.keys
        if wake_keys == before:
            return True
        if before and self._noted_place and not room.urgent and not wake_keys:
            # A claim that filled the worker has left already.
            affinity.leave(self._redis, self._noted_place)
        if self._wake_ups.leave():
            if room.most and not room.urgent:
                self._looks = True
                return False
            inbox_watch.look(
                self._redis,
                self._waited_for,
                wakes_anyway=True,
                on_repeated=self.note_repeated,
            )
        if wake_keys:
            wait_s = WAIT_S * random.uniform(1 - JITTER, 1 + JITTER)
            self._wake_ups.wait(wake_keys, wait_s)
            self._waited_for = queues.model_of(room.queues[0])
            self._silent_at_s = time.monotonic() + wait_s + REPLY_TIMEOUT_S
        return True

    def _sleep(self, *, hears: bool = True) -> None:
        """Until a wake-up comes, its time has come, or :meth:`wake` is called."""
        waits = hears and bool(self._wake_ups.keys)
        until_s = min(self._look_at_s, self._silent_at_s if waits else float("inf"))
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        if waits:
            poll.register(self._wake_ups, select.POLLIN)
        left_s = min(max(0.0, until_s - time.monotonic()), 2 * WAIT_S)
        ready = {file for file, _ in poll.poll(left_s * 1e3)}
        if self._wake_reader.fileno() in ready:
            with suppress(BlockingIOError):
                self._wake_reader.recv(4096)
        if time.monotonic() >= self._look_at_s:
            self._looks, self._look_at_s = True, float("inf")
        if waits:
            self._hear()

    def _hear(self) -> None:
        if self._wake_ups.has_answer():
            self._looks = self._wake_ups.read() or self._looks or self._something_waits()
        elif time.monotonic() >= self._silent_at_s:
            raise NoReply("a wait for jobs got no reply")

    def _something_waits(self) -> bool:
        """Asks in one command, which an idle worker repeats for ever."""
        room = self._room()
        idle = room.place, len(HELD_CLAIMS.running(self._model()))
        if room.place and self._idle != idle:
            self._noted_place, self._idle = room.place, idle
            affinity.note_idle(self._redis, *idle)
        filled = keys.waiting(self._model()), *queues.inbox(room.queues)
        return bool(room.queues and self._redis.exists(*filled))
