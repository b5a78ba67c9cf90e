"""What one reader of a stream hears of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque

MOST_UNREAD = 64
"""So many messages wait for a reader. One that has more to read reads the stream instead."""


class Feed:
    """The messages on the channel of one stream: see ``keys.events_channel``.

    They are all that is written to the stream after :meth:`look` was last called. It is called once
    the channel is subscribed, and whenever some may have been missed: the stream has everything.
    """

    def __init__(self, job_id: str, patience_s: float) -> None:
        self.job_id = job_id
        self.patience_s = patience_s
        self.since_s = time.monotonic()
        self._quiet = True
        self._is_complete = False
        """Whether what the reader has and the messages are all of the stream."""
        self._must_look = False
        self._messages: deque[str] = deque()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def look(self) -> None:
        """Has the reader look at the stream and the job."""
        self._is_complete, self._must_look = True, True
        self._messages.clear()
        self._changed.set()

    def take(self, message: str) -> None:
        """Hears a message."""
        self._quiet = False
        if len(self._messages) >= MOST_UNREAD:
            self.look()
        elif self._is_complete and not self._must_look:
            self._messages.append(message)
            self._changed.set()

    def was_quiet(self) -> bool:
        """Whether no message has come since the last call."""
        quiet, self._quiet = self._quiet, True
        return quiet

    def note(self, exists: bool) -> None:
        """Notes whether Redis has the job. If not, the reader sees to it."""
        if not exists:
            self.look()

    def fail(self, error: BaseException) -> None:
        """Ends the reader's wait with ``error``."""
        self._error = error
        self._changed.set()

    async def next(self, timeout_s: float | None) -> str | None:
        """Waits for a message. None if it is time to look, also after ``timeout_s``; what is
        written from then on is heard."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        if self._error is not None:
            raise self._error
        if self._must_look or not self._messages:
            self._must_look = False
            self._changed.clear()
            return None
        message = self._messages.popleft()
        if not self._messages:
            self._changed.clear()
        return message
