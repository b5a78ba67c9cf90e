"""Frames on a stream socket: a length of four bytes, then so many."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Final

MOST_BYTES: Final = 512 * 2**20
"""A longer frame is refused: as much as Redis holds in one value."""
_LENGTH = struct.Struct("<I")
_READ_BYTES: Final = 2**18


class FrameTooLarge(ValueError):
    """The frame is longer than :data:`MOST_BYTES`. Nothing of it was sent."""


class NoFrame(Exception):
    """What came is no frame: its length is beyond the limit."""


class Frames:
    """One end of a connection. Any thread may send, one receives.

    A send waits while the other end reads nothing: at most what the socket holds is under way.
    """

    def __init__(self, end: socket.socket, *, most_bytes: int = MOST_BYTES) -> None:
        self._socket = end
        self._most_bytes = most_bytes
        self._sending = threading.Lock()
        self._room = bytearray(_READ_BYTES)
        """What is read at once: new memory for each read would cost more than the read."""
        self._begun = bytearray()
        """What was read of frames that nobody has taken yet."""

    def check(self, payload: bytes) -> None:
        """Raises ``FrameTooLarge`` if it cannot be sent."""
        if len(payload) > self._most_bytes:
            raise FrameTooLarge(f"{len(payload)} bytes; at most {self._most_bytes} in a frame")

    def send(self, payload: bytes) -> None:
        """Raises ``FrameTooLarge``; ``OSError`` if the other end is gone."""
        self.check(payload)
        with self._sending:
            self.send_rest(self._send(payload, 0))

    def send_now(self, payload: bytes) -> memoryview:
        """Sends what the socket takes without a wait, and returns what is left of the frame, which
        has to be sent before anything else. For the only thread that sends."""
        return self._send(payload, socket.MSG_DONTWAIT)

    def send_rest(self, rest: memoryview) -> None:
        if rest:
            self._socket.sendall(rest)

    def _send(self, payload: bytes, flags: int) -> memoryview:
        # Side by side, because a copy of a long payload would take a while.
        length, sent = _LENGTH.pack(len(payload)), 0
        with suppress(BlockingIOError):
            sent = self._socket.sendmsg([length, payload], (), flags)
        if sent < len(length):
            return memoryview(length + payload)[sent:]
        return memoryview(payload)[sent - len(length) :]

    @property
    def has_frame(self) -> bool:
        """Whether a whole one has come that nobody has taken."""
        if len(self._begun) < _LENGTH.size:
            return False
        length: int = _LENGTH.unpack_from(self._begun)[0]
        return len(self._begun) >= _LENGTH.size + length

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Waits for the next frame; None if the other end has closed.

        Raises:
            TimeoutError: no whole frame came within ``timeout_s``; a later call goes on.
            NoFrame: what comes is none; nothing more can be read.
            ConnectionError: the connection ended amid a frame.
        """
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        length = None
        while True:
            if length is None and len(self._begun) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._begun)
                if length > self._most_bytes:
                    raise NoFrame(f"a frame of {length} bytes; at most {self._most_bytes}")
            end = _LENGTH.size + (length or 0)
            if length is not None and len(self._begun) >= end:
                frame = bytes(memoryview(self._begun)[_LENGTH.size : end])
                del self._begun[:end]
                return frame
            if give_up_s is not None:
                self._wait(give_up_s)
            # Memory grows with what has come, not with what a length says.
            count = self._socket.recv_into(self._room)
            if not count:
                if self._begun:
                    raise ConnectionError(f"ended after {len(self._begun)} bytes of a frame")
                return None
            self._begun += memoryview(self._room)[:count]

    def _wait(self, give_up_s: float) -> None:
        look = select.poll()
        look.register(self._socket, select.POLLIN)
        if not look.poll(max(0.0, give_up_s - time.monotonic()) * 1e3):
            raise TimeoutError

    def close(self) -> None:
        """Ends the connection; a thread that receives gets None, and so does the other end."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
