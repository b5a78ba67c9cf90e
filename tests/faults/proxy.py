"""A TCP proxy in front of Redis that fails on command.

The proxy runs on its own thread. Each method returns once its change is in force, so a test says
what fails and when, and never sleeps for it::

    with FaultProxy("127.0.0.1", redis_port) as proxy:
        start_worker(proxy.url)
        proxy.hold()                 # a partition: bytes wait in both directions
        proxy.heal()                 # they arrive late
        trap = proxy.lose_reply(calls("claim"))
        assert trap.wait(10)         # the script ran, its reply is lost, the connection is reset
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from llorch_worker.broker.scripts import digest
from tests.faults.connection import Connection, Link, Mode, Predicate, Trap, abort

LOCALHOST = "127.0.0.1"
CALL_TIMEOUT_S = 60.0

T = TypeVar("T")


def contains(*markers: bytes | str) -> Predicate:
    """Matches messages that contain all ``markers``."""
    wanted = [marker.encode() if isinstance(marker, str) else marker for marker in markers]
    return lambda message: all(marker in message for marker in wanted)


def calls(script: str, *markers: str) -> Predicate:
    """Matches calls of a script of ours by its digest, that of a pipeline too."""
    both = [
        contains("EVALSHA", digest(script, anyway=anyway), *markers) for anyway in (False, True)
    ]
    return lambda message: any(matches(message) for matches in both)


class FaultProxy:
    """Forwards connections to ``host:port`` and applies faults to them."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._connections: set[Connection] = set()
        self._link = Link()
        self._traps: list[Trap] = []
        self._server: asyncio.Server | None = None
        # Bound but never listening: it reserves the port while new connections are refused.
        self._reservation = _bound_socket(0)
        self.port: int = self._reservation.getsockname()[1]

    @property
    def url(self) -> str:
        return f"redis://{LOCALHOST}:{self.port}/0"

    def start(self) -> Self:
        self._thread.start()
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

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Faults ----------------------------------------------------------------------------------

    def heal(self) -> None:
        """Lets everything pass and accepts new connections.

        Held bytes arrive late. A connection that lost bytes is reset, because its two ends could
        not understand each other any more.
        """
        self._call(self._set(Mode.PASS))
        self._call(self._listen())

    def delay(self, delay_s: float) -> None:
        """Each byte arrives ``delay_s`` later, in order."""
        self._call(self._set(Mode.PASS, delay_s))

    def hold(self) -> None:
        """Nothing arrives until the proxy heals, and then everything does."""
        self._call(self._set(Mode.HOLD))

    def blackhole(self) -> None:
        """Swallows all bytes; connections stay open, and new ones are accepted."""
        self._call(self._set(Mode.BLACKHOLE))

    def reset(self) -> None:
        """Ends every open connection with RST, at both ends. New ones are accepted."""
        self._call(self._reset())

    def isolate(self) -> None:
        """Resets every connection and refuses new ones until the proxy heals."""
        self._call(self._stop_listening())
        self.reset()

    def lose_reply(self, request: Predicate, *, freeze: bool = False) -> Trap:
        """Redis runs the first request that matches; its reply is lost with the connection.

        The connection is reset. With ``freeze`` it stays open and silent until the proxy heals,
        which keeps a worker at this very point until the test has killed it. The trap lets an
        error reply pass and waits for the next match, because Redis first answers NOSCRIPT to a
        script that it does not know. Subscribed connections are exempt: their replies answer no
        particular request.
        """
        return self._arm(Trap(request, loses_reply=True, freeze=freeze))

    def lose_request(self, request: Predicate, *, freeze: bool = False) -> Trap:
        """The first request that matches never reaches Redis, and the connection fails as in
        :meth:`lose_reply`."""
        return self._arm(Trap(request, loses_reply=False, freeze=freeze))

    def cut_request(self, request: Predicate, after_bytes: int) -> Trap:
        """Redis gets only the first ``after_bytes`` of the first request that matches, and the
        connection is reset."""
        return self._arm(Trap(request, loses_reply=False, passes_bytes=after_bytes))

    def cut_reply(self, request: Predicate, after_bytes: int) -> Trap:
        """Redis runs the first request that matches. Its client gets only the first ``after_bytes``
        of the reply, and the connection is reset. Error replies pass, as in :meth:`lose_reply`."""
        return self._arm(Trap(request, loses_reply=True, passes_bytes=after_bytes))

    def wear_out(self, lifetime: Callable[[], int] | None) -> None:
        """Resets each connection made from now on after the bytes that ``lifetime`` draws for it,
        both ways together, be it in the middle of a message. None: they last again."""
        self._call(self._wear_out(lifetime))

    def disarm(self, trap: Trap) -> None:
        """Removes a trap that need not spring any more."""
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

    async def _wear_out(self, lifetime: Callable[[], int] | None) -> None:
        self._link.lifetime = lifetime

    async def _set(self, mode: Mode, delay_s: float = 0.0) -> None:
        self._link.set(mode, delay_s)
        for connection in tuple(self._connections):
            connection.on_change()

    async def _reset(self) -> None:
        ended = set(self._connections)
        for connection in ended:
            connection.reset()
        # Each leaves the set in its own task, while its client may be back with a new one.
        while self._connections & ended:
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
        if self._server is None:
            # It was in the backlog when the listener closed.
            abort(writer)
            return
        connection = Connection(self._link, self._traps, reader, writer)
        self._connections.add(connection)
        try:
            await connection.run(*self._upstream)
        finally:
            self._connections.discard(connection)


def _bound_socket(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((LOCALHOST, port))
    return bound
