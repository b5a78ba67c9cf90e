"""Sends frames to a process that may read nothing."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue

from llorch_worker.processes.frames import Frames


class Outbox:
    """A thread that sends, so that nobody else waits. Any thread may call it, also amid a signal's
    handler."""

    def __init__(self, frames: Frames, name: str) -> None:
        self._frames = frames
        self._payloads: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def send(self, payload: bytes) -> None:
        """Never waits. What the other end does not read before it ends is lost. Raises
        ``FrameTooLarge``."""
        self._frames.check(payload)
        self._payloads.put(payload)

    def close(self) -> None:
        """Ends the thread; what waits is sent before."""
        self._payloads.put(None)

    def _write(self) -> None:
        with suppress(OSError):  # the other end is gone, as its reader sees
            while (payload := self._payloads.get()) is not None:
                self._frames.send(payload)
