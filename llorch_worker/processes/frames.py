"""Frames on a stream socket: a length of four bytes, then so many."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Final

MOST_BYTES: Final = 512 * 2**20
"""A longer frame is refused: as much as Redis holds in one value."""
_LENGTH = struct.Struct("<I")
_READ_BYTES: Final = 2**18


class FrameTooLarge(ValueError):
    """The frame is longer than :data:`MOST_BYTES`. Nothing of it was sent."""


class NoFrame(Exception):
    """What came is no frame: its length is beyond the limit, or it ends amid it."""


class Frames:
    """One end of a connection. Any thread may send, one receives.

    A send waits while the other end reads nothing: at most what the socket holds is under way.
    """

    def __init__(self, end: socket.socket, *, most_bytes: int = MOST_BYTES) -> None:
        self._socket = end
        self._most_bytes = most_bytes
        self._sending = threading.Lock()
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
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)

    @property
    def has_frame(self) -> bool:
        """Whether a whole one has come that nobody has taken."""
        if len(self._begun) < _LENGTH.size:
            return False
        length: int = _LENGTH.unpack_from(self._begun)[0]
        return len(self._begun) >= _LENGTH.size + length

    def receive(self) -> bytes | None:
        """Waits for the next frame; None if the other end has closed.

        Raises:
            NoFrame: what comes is none; nothing more can be read.
        """
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
            # Memory grows with what has come, not with what a length says.
            more = self._socket.recv(_READ_BYTES)
            if not more:
                if self._begun:
                    raise NoFrame(f"the connection ended after {len(self._begun)} bytes of a frame")
                return None
            self._begun += more

    def close(self) -> None:
        """Ends the connection; a thread that receives gets None, and so does the other end."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
