"""Splits a byte stream into Redis messages, in either direction of a connection."""

from __future__ import annotations

_LINES = b"+-:_#,("
_STRINGS = b"$!="
_ARRAYS = b"*~>"
_MAPS = b"%|"
ASIDES = b">|"
"""First bytes of what a server sends unasked: pushes and attributes."""


class NotRedis(ValueError):
    """The bytes are not the Redis protocol."""


class Framer:
    """Splits a byte stream into whole RESP2 or RESP3 messages, requests as well as replies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        # How far the first message is read, and how many of its values are missing. Both are kept
        # between calls, so that a long message that arrives in pieces is read once.
        self._position = 0
        self._pending = 1

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the messages that ``data`` completes and keeps the rest.

        Raises:
            NotRedis: the stream cannot be split from here on; :meth:`rest` returns all of
                ``data`` and the bytes kept before it.
        """
        self._buffer += data
        ends: list[int] = []
        start = 0
        while self._read_message():
            ends.append(self._position)
            self._pending = 1
        messages = []
        for end in ends:
            messages.append(bytes(self._buffer[start:end]))
            start = end
        del self._buffer[:start]
        self._position -= start
        return messages

    def rest(self) -> bytes:
        """Returns the bytes kept for an incomplete message, and forgets them."""
        held = bytes(self._buffer)
        self._buffer.clear()
        self._position, self._pending = 0, 1
        return held

    def _read_message(self) -> bool:
        """Reads on to the end of the current message; returns whether it is complete."""
        while self._pending:
            if self._position >= len(self._buffer):
                return False
            kind = self._buffer[self._position]
            if kind not in _LINES + _STRINGS + _ARRAYS + _MAPS:
                raise NotRedis(f"a message cannot begin with byte {kind}")
            line_end = self._buffer.find(b"\r\n", self._position)
            if line_end < 0:
                return False
            size = 0 if kind in _LINES else self._number(line_end)
            self._pending -= 1
            self._position = line_end + 2
            if kind in _STRINGS and size >= 0:
                self._position += size + 2
            elif kind in _ARRAYS:
                self._pending += max(size, 0)
            elif kind in _MAPS:
                # An attribute precedes the value that it describes.
                self._pending += 2 * size + (kind == ord("|"))
        return self._position <= len(self._buffer)

    def _number(self, line_end: int) -> int:
        try:
            return int(self._buffer[self._position + 1 : line_end])
        except ValueError:
            raise NotRedis("a size is not a number") from None


def command_name(request: bytes) -> bytes:
    """The first word of a request in upper case: ``*2\\r\\n$3\\r\\nget...`` is ``GET``."""
    parts = request.split(b"\r\n", 3)
    return parts[2].upper() if len(parts) > 2 else b""
