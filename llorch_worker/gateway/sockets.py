"""WebSockets whose frames do not stop the event loop."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame

SMALL_FRAME_BYTES = 1_024
"""A smaller frame takes as long as an empty one: about 20 microseconds."""
MOST_SMALL_FRAMES = 1_000
"""Of a connection, in a second: pings, pieces of messages and whole messages."""


class Socket(WebSocketsSansIOProtocol):
    """uvicorn's connection, which ends with 1008 at too many small frames."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._small_frames = 0
        self._second_ends = 0.0
        self._take = self.conn.recv_frame
        self.conn.recv_frame = self._take_bounded  # type: ignore[method-assign]

    def _take_bounded(self, frame: Frame) -> None:
        if len(frame.data) < SMALL_FRAME_BYTES:
            now = self.loop.time()
            if now >= self._second_ends:
                self._second_ends = now + 1
                self._small_frames = 0
            self._small_frames += 1
            if self._small_frames > MOST_SMALL_FRAMES:
                reason = "too many small frames"
                self.conn.fail(CloseCode.POLICY_VIOLATION, reason)
                raise ProtocolError(reason)  # ends the parser
        self._take(frame)
