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
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.faults.connection import Connection, Direction, Link, Mode, Predicate, Trap, abort

LOCALHOST = "127.0.0.1"
CALL_TIMEOUT_S = 10.0

T = TypeVar("T")


def contains(*markers: bytes | str) -> Predicate:
    """True for a message in which every one of ``markers`` occurs."""
    wanted = [marker.encode() if isinstance(marker, str) else marker for marker in markers]
    return lambda message: all(marker in message for marker in wanted)


class FaultProxy:
    """Forwards connections to ``host:port`` and does to them what it is told."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._connections: set[Connection] = set()
        self._links = {Direction.REQUESTS: Link(), Direction.REPLIES: Link()}
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
        self.accepted_total += 1
        if self._server is None:
            # It was in the backlog when the listener closed.
            abort(writer)
            return
        connection = Connection(self._links, self._traps, reader, writer)
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
