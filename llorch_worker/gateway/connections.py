"""Connections that wait for a request: not for ever, and not too many from one address."""

from __future__ import annotations

import asyncio
import resource
import select
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from llorch_worker.gateway.comments import Comments

CONNECTION = "connection"
"""Where the state of a request has its connection."""
COMMENT = b": alive\n\n"
MOST_NOT_TAKEN = 4
"""A reader that takes nothing while so many comments are due is gone."""

Waiting = dict[str, dict["Connection", None]]
"""The connections of each address without a request, the longest waiting first."""


MOST_CHUNKS = 8_192
"""Of a body, in what is read of a connection at once: at most 256 KiB."""
YOUNG = 0.25
"""Part of the time for a header in which no other connection closes a new one: the requests of many
that come at once are read after all of them are accepted."""
FIRST_PROBE_S = 0.05
LONGEST_PROBE_S = 15.0
"""Pauses between looks at a client that has closed its sending half."""
OLD_CLIENT_S = 5.0
"""How long a client of HTTP/1.0 may wait then, before it counts as gone."""


def connections(header_timeout_s: float, most_waiting: int) -> type[asyncio.Protocol]:
    """uvicorn's connection, with two limits.

    ``header_timeout_s``: for the whole header of a request, from the connection or the header's
    first byte on. ``most_waiting``: connections without a request from one address; one more
    closes that which has waited longest, soon.
    """

    own = {
        "header_timeout_s": header_timeout_s,
        "most_waiting": most_waiting,
        "waiting": defaultdict(dict),
        "comments": Comments(),
    }
    return type("_Connection", (Connection,), own)


class Connection(H11Protocol):
    header_timeout_s: float
    most_waiting: int
    waiting: Waiting
    comments: Comments

    at_stop: Callable[[], None] | None = None
    """Ends an answer that would not end by itself when the gateway stops."""
    _not_taken = 0
    _header_due: asyncio.TimerHandle | None = None
    _address = ""
    _chunks = 0
    _half_closed = False
    _next_probe: asyncio.TimerHandle | None = None
    _old_client_due: asyncio.TimerHandle | None = None
    _has_comments = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._parse = self.conn.next_event
        self.conn.next_event = self._next_event  # type: ignore[method-assign]
        self._address = self.client[0] if self.client else ""
        self._expect_header()
        self._wait()

    def _next_event(self) -> Any:
        """h11 takes as long for a chunk of one byte as for one of thousands."""
        event = self._parse()
        if isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event

    def data_received(self, data: bytes) -> None:
        self._chunks = 0
        if self._header_due is None and not self._is_answering():
            self._expect_header()
        super().data_received(data)
        if self._is_answering():
            self._answer()

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._stop_waiting()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()
        if self._is_answering():  # the next request had come already
            self._answer()
        elif self._half_closed:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may close its half of the connection, and wait for the answer to what it sent.

        One that has hung up looks the same until something is sent to it. An interim response, or a
        comment in a stream, changes nothing for the first, and ends the connection to the second.
        """
        if not self._is_answering() or self.cycle.more_body:
            return False
        self._half_closed = True
        if self.scope["http_version"] == "1.0":
            self._old_client_due = self.loop.call_later(OLD_CLIENT_S, self._give_up)
        self._probe(FIRST_PROBE_S)
        return True

    def _waits_for_answer(self) -> bool:
        return self._is_answering() and not self.cycle.response_started

    def _give_up(self) -> None:
        if self._waits_for_answer():
            self.transport.close()

    def _probe(self, next_s: float) -> None:
        if not self._is_answering():
            return
        if self._has_comments:
            self._write_comment()
        elif self._waits_for_answer() and self.scope["http_version"] != "1.0":
            # HTTP/1.0 knows no interim responses.
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self._next_probe = self.loop.call_later(
            next_s, self._probe, min(2 * next_s, LONGEST_PROBE_S)
        )

    def shutdown(self) -> None:
        super().shutdown()
        if self.at_stop is not None:
            self.at_stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.end_comments()
        for timer in (self._next_probe, self._old_client_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def begin_comments(self) -> None:
        """Writes comments into the answer now and then, until :meth:`end_comments`. They pass by
        everything around the route: what each costs is paid some hundred times a second."""
        self._has_comments = True
        self.comments.add(self._comment)

    def end_comments(self) -> None:
        self._has_comments = False
        self.comments.remove(self._comment)

    def _comment(self) -> None:
        if self._write_comment():
            self._not_taken = 0
            return
        self._not_taken += 1
        if self._not_taken >= MOST_NOT_TAKEN:
            self.transport.abort()

    def _write_comment(self) -> bool:
        """Whether it could be written: what waits to be taken finds out by itself who is gone."""
        if self.flow.write_paused:
            return False
        self.transport.write(self.conn.send(h11.Data(data=COMMENT)))
        return True

    def _answer(self) -> None:
        self._stop_waiting()
        self.cycle.scope["state"][CONNECTION] = self

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_header(self) -> None:
        self._header_due = self.loop.call_later(
            self.header_timeout_s, self.timeout_keep_alive_handler
        )

    def _wait(self) -> None:
        own = self.waiting[self._address]
        own[self] = None
        if len(own) > self.most_waiting:
            self.loop.call_later(YOUNG * self.header_timeout_s, self._close_longest)

    def _close_longest(self) -> None:
        """Closes that which has waited longest, if there are too many still."""
        own = self.waiting.get(self._address, {})
        if len(own) <= self.most_waiting:
            return
        longest = next(iter(own))
        del own[longest]
        if longest._has_more():
            own[longest] = None
            self.loop.call_later(YOUNG * self.header_timeout_s, self._close_longest)
        else:
            longest.timeout_keep_alive_handler()

    def _has_more(self) -> bool:
        """Whether something has come that is not read yet."""
        look = select.poll()
        look.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(look.poll(0))

    def _stop_waiting(self) -> None:
        if self._header_due is not None:
            self._header_due.cancel()
            self._header_due = None
        own: dict[Any, None] = self.waiting.get(self._address, {})
        own.pop(self, None)
        if not own:
            self.waiting.pop(self._address, None)


def raise_file_limit() -> None:
    """Raises the soft limit of open files, often 1,024, to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS names a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
