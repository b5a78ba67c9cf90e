"""Reading a job's event stream: the part that needs no connection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from llorch_worker.broker import keys
from llorch_worker.broker.results import StoredState, terminal_event
from llorch_worker.contract import TERMINAL_EVENTS, Event, decode_event

FROM_THE_START = "0"
BLOCK_MS = 1_000
"""How long one blocking read waits; between two of them the reader looks for a stored result."""
WATCH_TTL_S = 5
"""The publisher flushes at its fast interval for this long after a reader last said it is there."""
WATCH_RENEW_S = 2.0
READ_COUNT = 200


class StreamEntry(NamedTuple):
    """One event and the id after which to resume: ``job.stream(from_id=entry.entry_id)``."""

    entry_id: str
    event: Event


class StreamCursor:
    """Where a reader stands in the stream of one job."""

    def __init__(self, job_id: str, from_id: str) -> None:
        self.key = keys.events(job_id)
        self.last_id = from_id
        self.ended = False

    def block_ms(self, timeout: float | None, silent_s: float) -> int:
        """How long the next read may block for a reader that heard nothing for ``silent_s``."""
        if timeout is None:
            return BLOCK_MS
        # 0 would mean for ever.
        return max(1, min(BLOCK_MS, int((timeout - silent_s) * 1e3)))

    def accept(self, reply: Any) -> Iterator[StreamEntry]:
        """The entries of an XREAD reply; sets ``ended`` at the terminal event."""
        for _, entries in reply:
            for entry_id, fields in entries:
                event = decode_event(fields["event"])
                self.last_id = entry_id
                self.ended = isinstance(event, TERMINAL_EVENTS)
                yield StreamEntry(entry_id, event)
                if self.ended:
                    return

    def close_with(self, state: StoredState) -> StreamEntry | None:
        """The terminal event made from the stored result, where the stream lacks its own.

        The stream may have expired, or its last write may have been lost with the worker: a
        reader must not wait for ever for a job that has ended.
        """
        if state.end is None:
            return None
        self.ended = True
        return StreamEntry(self.last_id, terminal_event(state.end))
