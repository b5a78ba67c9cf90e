"""Where one Redis message ends and the next begins, in either direction of a connection."""

from __future__ import annotations

_LINES = b"+-:_#,("
_STRINGS = b"$!="
_ARRAYS = b"*~>"
_MAPS = b"%|"
_KINDS = _LINES + _STRINGS + _ARRAYS + _MAPS
ASIDES = b">|"
"""First bytes of what a server says without having been asked: pushes and attributes."""


class NotRedis(ValueError):
    """The bytes are no Redis protocol."""


class Framer:
    """Cuts a byte stream into whole RESP2 or RESP3 messages, requests as well as replies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        # How far the first message of the buffer is read, and how many values it still lacks:
        # kept, so that a long message that comes in pieces is read once.
        self._position = 0
        self._pending = 1

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes; what is left over waits for more.

        Raises:
            NotRedis: from here on the stream cannot be cut; :meth:`rest` has all of ``data`` and
                what was held before it.
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
        """The bytes held back for an incomplete message; they are not held any more."""
        held = bytes(self._buffer)
        self._buffer.clear()
        self._position, self._pending = 0, 1
        return held

    def _read_message(self) -> bool:
        """Reads on to the end of the current message; whether it is all there."""
        while self._pending:
            if self._position >= len(self._buffer):
                return False
            kind = self._buffer[self._position]
            if kind not in _KINDS and not chr(kind).isalpha():
                raise NotRedis(f"a message cannot begin with byte {kind}")
            line_end = self._buffer.find(b"\r\n", self._position)
            if line_end < 0:
                return False
            after = line_end + 2
            if kind in _STRINGS:
                size = self._number(line_end)
                after += size + 2 if size >= 0 else 0
                self._pending -= 1
            elif kind in _ARRAYS:
                self._pending += max(self._number(line_end), 0) - 1
            elif kind in _MAPS:
                # An attribute is followed by the value that it describes.
                self._pending += 2 * self._number(line_end) - (kind != ord("|"))
            else:
                # One line. A letter begins an inline command: PING\r\n.
                self._pending -= 1
            self._position = after
        return self._position <= len(self._buffer)

    def _number(self, line_end: int) -> int:
        try:
            return int(self._buffer[self._position + 1 : line_end])
        except ValueError:
            raise NotRedis("a size that is no number") from None


def command_name(request: bytes) -> bytes:
    """The first word of a request, upper case: ``*2\\r\\n$3\\r\\nGET...`` is ``GET``."""
    if request[:1] != b"*":
        return request.split(None, 1)[0].upper()
    parts = request.split(b"\r\n", 3)
    return parts[2].upper() if len(parts) > 2 else b""
