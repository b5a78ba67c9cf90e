"""A TCP proxy in front of Redis that fails on command.

It runs on a thread of its own. Every method that changes it returns once the change is in force,
so a test says what fails and when, and never sleeps for it::

    with FaultProxy("127.0.0.1", redis_port) as proxy:
        start_worker(proxy.url)
        proxy.hold()                 # a partition: bytes wait in both directions
        proxy.heal()                 # they arrive late
        trap = proxy.lose_reply(contains(claim_sha))
        assert trap.wait(10)         # the script ran, its answer is lost, the connection reset
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.faults.resp import ASIDES, Framer, NotRedis, command_name

LOCALHOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
HELD_CHUNKS = 256
"""A held direction takes this many chunks; then the sender meets a full window, as in life."""
CALL_TIMEOUT_S = 10.0
SUBSCRIBING = (b"SUBSCRIBE", b"PSUBSCRIBE", b"SSUBSCRIBE", b"MONITOR")
"""After one of these the replies of a connection cannot be counted against its requests."""

T = TypeVar("T")
Predicate = Callable[[bytes], bool]
LookAt = Callable[[bytes], "Trap | None"]


class Direction(Flag):
    """Which way bytes go, seen from the client."""

    REQUESTS = auto()
    REPLIES = auto()
    BOTH = REQUESTS | REPLIES


class Mode(Enum):
    PASS = auto()
    HOLD = auto()
    BLACKHOLE = auto()


def contains(*markers: bytes | str) -> Predicate:
    """True for a message in which every one of ``markers`` occurs."""
    wanted = [marker.encode() if isinstance(marker, str) else marker for marker in markers]
    return lambda message: all(marker in message for marker in wanted)


class Trap:
    """Waits for one message and loses it, together with its connection."""

    def __init__(self, matches: Predicate, losing: Direction, freeze: bool) -> None:
        self.matches = matches
        self.losing = losing
        self.freeze = freeze
        self._sprung = threading.Event()

    @property
    def sprung(self) -> bool:
        return self._sprung.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has lost its message, waiting for that at most ``timeout_s``."""
        return self._sprung.wait(timeout_s)

    def spring(self) -> None:
        self._sprung.set()


@dataclass
class _Link:
    """The state of one direction, shared by all connections."""

    mode: Mode = Mode.PASS
    delay_s: float = 0.0
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, mode: Mode, delay_s: float = 0.0) -> None:
        self.mode, self.delay_s = mode, delay_s
        self.flowing.clear() if mode is Mode.HOLD else self.flowing.set()


class FaultProxy:
    """Forwards connections to ``host:port`` and does to them what it is told."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._connections: set[_Connection] = set()
        self._links = {Direction.REQUESTS: _Link(), Direction.REPLIES: _Link()}
        self._traps: list[Trap] = []
        self._server: asyncio.Server | None = None
        # Bound but never listening: it keeps the port ours while new connections are refused.
        self._reservation = _bound_socket(0)
        self.port: int = self._reservation.getsockname()[1]
        self.accepted_total = 0

    @property
    def url(self) -> str:
        return f"redis://{LOCALHOST}:{self.port}/0"

    def start(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        self.heal()
        return self

    def stop(self) -> None:
        """Resets every connection and ends the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()
        self._reservation.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # Faults ----------------------------------------------------------------------------------

    def heal(self) -> None:
        """Everything passes and new connections are accepted.

        What was held is delivered late. A connection that lost bytes is reset: its two ends would
        never understand each other again.
        """
        self._call(self._set(Direction.BOTH, Mode.PASS))
        self._call(self._listen())

    def delay(self, delay_s: float, direction: Direction = Direction.BOTH) -> None:
        """Each byte arrives ``delay_s`` later, in order."""
        self._call(self._set(direction, Mode.PASS, delay_s))

    def hold(self, direction: Direction = Direction.BOTH) -> None:
        """Nothing arrives until the proxy heals, and then everything does."""
        self._call(self._set(direction, Mode.HOLD))

    def blackhole(self, direction: Direction = Direction.BOTH) -> None:
        """Bytes are taken and never arrive; connections, new ones too, stay open."""
        self._call(self._set(direction, Mode.BLACKHOLE))

    def reset(self) -> None:
        """Every open connection ends with RST, at both ends. New ones are accepted."""
        self._call(self._reset())

    def refuse(self) -> None:
        """New connections are refused until the proxy heals; open ones go on."""
        self._call(self._stop_listening())

    def isolate(self) -> None:
        """No connection, old or new, until the proxy heals."""
        self.refuse()
        self.reset()

    def lose_reply(self, request: Predicate, *, freeze: bool = False) -> Trap:
        """The first request that matches is carried out; its reply is lost with its connection.

        The connection is reset, or with ``freeze`` stays open and silent until the proxy heals,
        which holds a worker at this very point until the test has killed it. An error reply is
        passed on and the trap waits for the next match, because a script that Redis does not know
        yet is first answered with NOSCRIPT. Subscribed connections are exempt: their replies
        answer no particular request.
        """
        return self._arm(Trap(request, Direction.REPLIES, freeze))

    def lose_request(self, request: Predicate, *, freeze: bool = False) -> Trap:
        """The first request that matches never reaches Redis; as for its connection, see
        :meth:`lose_reply`."""
        return self._arm(Trap(request, Direction.REQUESTS, freeze))

    def disarm(self, trap: Trap) -> None:
        """Takes back a trap that is not to spring any more."""
        self._call(self._disarm(trap))

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    # On the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    def _arm(self, trap: Trap) -> Trap:
        async def arm() -> None:
            self._traps.append(trap)

        self._call(arm())
        return trap

    async def _disarm(self, trap: Trap) -> None:
        if trap in self._traps:
            self._traps.remove(trap)

    async def _set(self, direction: Direction, mode: Mode, delay_s: float = 0.0) -> None:
        for one in direction:
            self._links[one].set(mode, delay_s)
        for connection in tuple(self._connections):
            connection.on_change()

    async def _reset(self) -> None:
        for connection in tuple(self._connections):
            connection.reset()
        # Each leaves the set in its own task; the change is in force when all have.
        while self._connections:
            await asyncio.sleep(0)

    async def _listen(self) -> None:
        if self._server is None:
            listener = _bound_socket(self.port)
            self._server = await asyncio.start_server(self._accept, sock=listener, backlog=128)

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _close(self) -> None:
        await self._stop_listening()
        await self._reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted_total += 1
        if self._server is None:
            # It was in the backlog when the listener closed.
            _abort(writer)
            return
        connection = _Connection(self._links, self._traps, reader, writer)
        self._connections.add(connection)
        try:
            await connection.run(*self._upstream)
        finally:
            self._connections.discard(connection)


class _Connection:
    """One client's connection and ours to Redis beside it."""

    def __init__(
        self,
        links: dict[Direction, _Link],
        traps: list[Trap],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._links = links
        self._traps = traps
        self._client = reader, writer
        self._writers = [writer]
        self._lost_bytes = False
        self._caught: Trap | None = None
        self._over = asyncio.Event()
        # Counting requests against replies, for the traps.
        self._requests_total = 0
        self._replies_total = 0
        self._countable = True
        self._doomed: dict[int, Trap] = {}

    async def run(self, host: str, port: int) -> None:
        """Forwards both ways until both ends have closed, or :meth:`reset`."""
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            _abort(self._client[1])
            return
        self._writers.append(writer)
        pumps = [
            self._pump(Direction.REQUESTS, self._client[0], writer, self._look_at_request),
            self._pump(Direction.REPLIES, reader, self._client[1], self._look_at_reply),
        ]
        both = asyncio.ensure_future(asyncio.gather(*pumps, return_exceptions=True))
        over = asyncio.ensure_future(self._over.wait())
        waiting: list[asyncio.Future[Any]] = [both, over]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for each in self._writers:
                _abort(each)
            # The loop closes an aborted socket in its next turn.
            await asyncio.sleep(0)
            if self._caught is not None:
                self._caught.spring()

    def reset(self) -> None:
        for writer in self._writers:
            _abort(writer)
        self._over.set()

    def on_change(self) -> None:
        swallowing = any(link.mode is Mode.BLACKHOLE for link in self._links.values())
        if self._lost_bytes and not swallowing:
            self.reset()

    async def _pump(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        look_at: LookAt,
    ) -> None:
        """Reads as fast as bytes come, so that delays add up to latency and not to slowness."""
        link = self._links[direction]
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD_CHUNKS)
        sender = asyncio.create_task(self._send(link, waiting, writer))
        sender.add_done_callback(lambda _: self._fail_if_broken(sender))
        framer: Framer | None = Framer()
        try:
            while True:
                try:
                    data = await reader.read(CHUNK_BYTES)
                except OSError:
                    data = b""
                forward, framer, trap = _screen(data, framer, look_at)
                if forward:
                    await waiting.put((self._now_s() + link.delay_s, forward))
                if trap is not None:
                    await waiting.join()
                    await self._fall_into(trap)
                    return
                if not data:
                    break
            await waiting.put((self._now_s() + link.delay_s, b""))
            await sender
        finally:
            sender.cancel()

    async def _send(
        self,
        link: _Link,
        waiting: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
    ) -> None:
        while True:
            due_s, data = await waiting.get()
            wait_s = due_s - self._now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await link.flowing.wait()
            if link.mode is Mode.BLACKHOLE:
                # An end of stream is swallowed like any byte: the other side hears nothing.
                self._lost_bytes = True
            elif data:
                writer.write(data)
                await writer.drain()
            elif writer.can_write_eof():
                writer.write_eof()
            waiting.task_done()
            if not data:
                if self._lost_bytes:
                    await self._over.wait()
                return

    async def _fall_into(self, trap: Trap) -> None:
        self._lost_bytes = True
        if trap.freeze:
            trap.spring()
            await self._over.wait()
        else:
            # It springs once the connection is closed.
            self._caught = trap
            self.reset()

    def _fail_if_broken(self, sender: asyncio.Task[None]) -> None:
        if not sender.cancelled() and isinstance(sender.exception(), OSError):
            self.reset()

    def _look_at_request(self, message: bytes) -> Trap | None:
        """The trap in which this request is lost."""
        number = self._requests_total
        self._requests_total += 1
        if command_name(message) in SUBSCRIBING:
            self._countable = False
        for trap in self._traps:
            if not trap.matches(message):
                continue
            if trap.losing is Direction.REQUESTS:
                self._traps.remove(trap)
                return trap
            if self._countable:
                self._doomed[number] = trap
        return None

    def _look_at_reply(self, message: bytes) -> Trap | None:
        """The trap in which this reply is lost."""
        if message[0] in ASIDES or not self._countable:
            return None
        trap = self._doomed.pop(self._replies_total, None)
        self._replies_total += 1
        # A trap springs once, though several connections may have matched it.
        if trap is None or trap not in self._traps or message[:1] == b"-":
            return None
        self._traps.remove(trap)
        return trap

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _screen(
    data: bytes, framer: Framer | None, look_at: LookAt
) -> tuple[bytes, Framer | None, Trap | None]:
    """What of ``data`` to forward, the framer from now on, and the trap that took a message.

    Only whole messages are forwarded, so that a lost one leaves no half behind. What is no Redis
    protocol (TLS, say) passes as it is.
    """
    if framer is None:
        return data, None, None
    if not data:
        return framer.rest(), framer, None
    try:
        messages = framer.feed(data)
    except NotRedis:
        return framer.rest(), None, None
    for place, message in enumerate(messages):
        trap = look_at(message)
        if trap is not None:
            return b"".join(messages[:place]), framer, trap
    return b"".join(messages), framer, None


def _bound_socket(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((LOCALHOST, port))
    return bound


def _abort(writer: asyncio.StreamWriter) -> None:
    """Closes with RST: no lingering, nothing flushed."""
    connection = writer.transport.get_extra_info("socket")
    if connection is not None and not writer.transport.is_closing():
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


__all__ = ["Direction", "FaultProxy", "Trap", "contains"]
