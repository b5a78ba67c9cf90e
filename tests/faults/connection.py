"""One proxied connection and its faults."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from tests.faults.resp import ASIDES, Framer, NotRedis, command_name

CHUNK_BYTES = 1 << 16
HELD_CHUNKS = 256
"""How many chunks each direction holds; after that the sender meets a full TCP window."""
SUBSCRIBING = (b"SUBSCRIBE", b"PSUBSCRIBE", b"SSUBSCRIBE", b"MONITOR")
"""After one of these, a connection's replies no longer match its requests one to one."""

Predicate = Callable[[bytes], bool]
LookAt = Callable[[bytes], "Trap | None"]


class Mode(Enum):
    PASS = auto()
    HOLD = auto()
    BLACKHOLE = auto()


class Trap:
    """Waits for one request; loses it or its reply, together with the connection.

    The first ``passes_bytes`` of what is lost still arrive.
    """

    def __init__(
        self, matches: Predicate, *, loses_reply: bool, freeze: bool = False, passes_bytes: int = 0
    ) -> None:
        self.matches = matches
        self.loses_reply = loses_reply
        self.freeze = freeze
        self.passes_bytes = passes_bytes
        self.size = 0
        """The bytes of the request or reply that it took, all of them."""
        self._sprung = threading.Event()

    @property
    def sprung(self) -> bool:
        return self._sprung.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` for the loss; returns whether it happened."""
        return self._sprung.wait(timeout_s)

    def spring(self) -> None:
        self._sprung.set()


@dataclass
class Link:
    """The state of the network, shared by all connections and both directions."""

    mode: Mode = Mode.PASS
    delay_s: float = 0.0
    lifetime: Callable[[], int] | None = None
    """Draws how many bytes a new connection carries, both ways together, before it is reset."""
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, mode: Mode, delay_s: float = 0.0) -> None:
        self.mode, self.delay_s = mode, delay_s
        self.flowing.clear() if mode is Mode.HOLD else self.flowing.set()


class Connection:
    """A client's connection to the proxy, and the proxy's connection to Redis for it."""

    def __init__(
        self,
        link: Link,
        traps: list[Trap],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._link = link
        self._traps = traps
        self._left_bytes = None if link.lifetime is None else link.lifetime()
        self._client = reader, writer
        self._writers = [writer]
        self._lost_bytes = False
        self._caught: Trap | None = None
        self._over = asyncio.Event()
        # Traps match replies to requests by counting both.
        self._requests_total = 0
        self._replies_total = 0
        self._countable = True
        self._doomed: dict[int, Trap] = {}

    async def run(self, host: str, port: int) -> None:
        """Forwards both ways until both ends have closed, or :meth:`reset`."""
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            abort(self._client[1])
            return
        self._writers.append(writer)
        pumps = [
            self._pump(self._client[0], writer, self._look_at_request),
            self._pump(reader, self._client[1], self._look_at_reply),
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
                abort(each)
            # The loop closes an aborted socket in its next iteration.
            await asyncio.sleep(0)
            if self._caught is not None:
                self._caught.spring()

    def reset(self) -> None:
        for writer in self._writers:
            abort(writer)
        self._over.set()

    def on_change(self) -> None:
        if self._lost_bytes and self._link.mode is not Mode.BLACKHOLE:
            self.reset()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look_at: LookAt
    ) -> None:
        """Reads as fast as bytes come, so that a delay adds latency without cutting throughput."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD_CHUNKS)
        sender = asyncio.create_task(self._send(waiting, writer))
        sender.add_done_callback(lambda _: self._reset_if_broken(sender))
        framer: Framer | None = Framer()
        try:
            while True:
                try:
                    data = await reader.read(CHUNK_BYTES)
                except OSError:
                    data = b""
                forward, framer, trap = _screen(data, framer, look_at)
                if forward:
                    await waiting.put((self._now_s() + self._link.delay_s, forward))
                if trap is not None:
                    await waiting.join()
                    await self._fall_into(trap)
                    return
                if not data:
                    break
            await waiting.put((self._now_s() + self._link.delay_s, b""))
            await sender
        finally:
            sender.cancel()

    async def _send(
        self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due_s, data = await waiting.get()
            await asyncio.sleep(due_s - self._now_s())
            await self._link.flowing.wait()
            if self._link.mode is Mode.BLACKHOLE:
                # The end of the stream is swallowed like any byte: the other side hears nothing.
                self._lost_bytes = True
            elif data:
                writer.write(data[: self._left_bytes])
                await writer.drain()
                self._wear(len(data))
            elif writer.can_write_eof():
                writer.write_eof()
            waiting.task_done()
            if not data:
                if self._lost_bytes:
                    await self._over.wait()
                return

    def _wear(self, size: int) -> None:
        """Counts what was sent; the connection breaks once it has carried all its bytes."""
        if self._left_bytes is not None:
            self._left_bytes = max(0, self._left_bytes - size)
            if not self._left_bytes:
                self.reset()

    async def _fall_into(self, trap: Trap) -> None:
        self._lost_bytes = True
        if trap.freeze:
            trap.spring()
            await self._over.wait()
        else:
            # The trap springs once the connection is closed.
            self._caught = trap
            self.reset()

    def _reset_if_broken(self, sender: asyncio.Task[None]) -> None:
        if not sender.cancelled() and isinstance(sender.exception(), OSError):
            self.reset()

    def _look_at_request(self, message: bytes) -> Trap | None:
        """The trap that takes this request."""
        number = self._requests_total
        self._requests_total += 1
        if command_name(message) in SUBSCRIBING:
            self._countable = False
        for trap in self._traps:
            if not trap.matches(message):
                continue
            if not trap.loses_reply:
                self._traps.remove(trap)
                return trap
            if self._countable:
                self._doomed[number] = trap
        return None

    def _look_at_reply(self, message: bytes) -> Trap | None:
        """The trap that takes this reply."""
        if message[0] in ASIDES or not self._countable:
            return None
        trap = self._doomed.pop(self._replies_total, None)
        self._replies_total += 1
        # A trap springs once, even if requests of several connections matched it.
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
    """What of ``data`` to forward, the framer for the rest, and the trap that took a message.

    Only whole messages are forwarded, so a lost message leaves no more behind than its trap lets
    pass. Anything that is not the Redis protocol, such as TLS, passes unchanged.
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
            trap.size = len(message)
            return b"".join(messages[:place]) + message[: trap.passes_bytes], framer, trap
    return b"".join(messages), framer, None


def abort(writer: asyncio.StreamWriter) -> None:
    """Closes with RST; nothing is flushed."""
    connection = writer.transport.get_extra_info("socket")
    if connection is not None and not writer.transport.is_closing():
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
