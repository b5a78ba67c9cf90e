"""Sends frames to a process that may read nothing."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue

from llorch_worker.processes.frames import Frames


class Outbox:
    """Sends without waiting. Any thread may call it, also amid a signal's handler.

    Who sends does so itself as far as the socket takes it, so that no thread has to be woken for
    what is short. A thread sends what remains.
    """

    def __init__(self, frames: Frames, name: str) -> None:
        """``frames``: nobody else sends there."""
        self._frames = frames
        self._payloads: deque[bytes] = deque()
        self._sending = threading.Lock()
        """Its holder sends what others add meanwhile. With a rest it goes over to the thread."""
        self._rests: SimpleQueue[memoryview | None] = SimpleQueue()
        threading.Thread(target=self._send_rests, name=name, daemon=True).start()

    def send(self, payload: bytes) -> None:
        """Never waits. What the other end does not read before it ends is lost. Raises
        ``FrameTooLarge``."""
        self._frames.check(payload)
        self._payloads.append(payload)
        self._send_what_fits()

    def close(self) -> None:
        """Ends the thread once it has sent the rest that it has, if any; nothing more is sent
        then. The end of the connection frees one that waits for the other end to read."""
        self._rests.put(None)

    def _send_what_fits(self) -> None:
        # Again after a release: what was added just before it has nobody else.
        while self._payloads and self._sending.acquire(blocking=False):
            rest = None
            try:
                while self._payloads and not rest:
                    rest = self._frames.send_now(self._payloads.popleft())
            except OSError:  # the other end is gone, as its reader sees
                self._payloads.clear()
            finally:
                if rest:
                    self._rests.put(rest)
                else:
                    self._sending.release()

    def _send_rests(self) -> None:
        while (rest := self._rests.get()) is not None:
            try:
                self._frames.send_rest(rest)
                while self._payloads:
                    self._frames.send(self._payloads.popleft())
            except OSError:
                self._payloads.clear()
            self._sending.release()
            self._send_what_fits()
