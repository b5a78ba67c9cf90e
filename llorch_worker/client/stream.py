"""Reading a job's event stream: the part that needs no connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llorch_worker.broker import keys
from llorch_worker.broker.results import StoredState, terminal_event
from llorch_worker.contract import TERMINAL_EVENTS, Event, Tokens, decode_event

FROM_THE_START = "0"
BLOCK_MS = 1_000
"""How long one read blocks. Between reads the reader looks for a stored result."""
WATCH_TTL_S = 5
"""How long the publisher flushes at its fast interval after a reader last announced itself."""
WATCH_RENEW_S = 2.0
READ_COUNT = 200


class StreamEntry(NamedTuple):
    """One event and the id after which to resume: ``job.stream(from_id=entry.entry_id)``."""

    entry_id: str
    event: Event


@dataclass
class _Seen:
    """What a reader has of one choice: its tokens, and the characters before each position at which
    an event began or ended."""

    tokens: int
    chars_before: dict[int, int] = field(default_factory=dict)

    def rest(self, event: Tokens) -> Tokens | None:
        """The part of ``event`` that the reader has not seen.

        A Redis that lost its last writes gets them again from the job's next run, in other entries.
        """
        chars = self.chars_before.setdefault(self.tokens, 0)
        start = self.chars_before.get(event.index, chars)
        index = max(event.index, self.tokens)
        ids, text = event.ids[index - event.index :], event.text[max(0, chars - start) :]
        end = event.index + len(event.ids)
        self.chars_before[end] = start + len(event.text)
        self.tokens = max(end, self.tokens)
        if not ids and not text:
            return None
        logprobs = event.logprobs and event.logprobs[len(event.ids) - len(ids) :]
        return event.model_copy(
            update={"index": index, "ids": ids, "text": text, "logprobs": logprobs}
        )


class StreamCursor:
    """A reader's position in the stream of one job.

    ``timeout``: how many seconds a reader waits for an event; None: without limit.
    """

    def __init__(self, job_id: str, from_id: str, timeout: float | None) -> None:
        self.key = keys.events(job_id)
        self.last_id = from_id
        self.ended = False
        self._job_id = job_id
        self._timeout = timeout
        self._heard_at_s = time.monotonic()
        self._announced_at_s = float("-inf")
        self._seen: dict[int, _Seen] = {}

    def must_announce(self) -> bool:
        """Whether to notify the publisher now that a client reads; assumes that the caller does."""
        due = time.monotonic() - self._announced_at_s > WATCH_RENEW_S
        if due:
            self._announced_at_s = time.monotonic()
        return due

    def block_ms(self) -> int:
        """How long the next read may block."""
        if self._timeout is None:
            return BLOCK_MS
        # 0 would block forever.
        return max(1, min(BLOCK_MS, int((self._timeout - self._silent_s()) * 1e3)))

    def entries(self, reply: Any, state: StoredState | None) -> Iterator[StreamEntry]:
        """The entries of an XREAD reply, without tokens that an earlier entry had.

        Sets ``ended`` at the terminal event.

        If the reply is empty but ``state`` says that the job has ended, the terminal event is made
        from the result: the stream may have expired, or its last write may have been lost with the
        worker.

        Raises:
            TimeoutError: no event came in time.
        """
        if reply:
            for entry_id, fields in reply[0][1]:
                event = decode_event(fields["event"])
                self.last_id = entry_id
                self.ended = isinstance(event, TERMINAL_EVENTS)
                if isinstance(event, Tokens):
                    seen = self._seen.setdefault(event.choice, _Seen(event.index))
                    rest = seen.rest(event)
                    if rest is None:
                        continue
                    event = rest
                yield StreamEntry(entry_id, event)
                if self.ended:
                    return
            # The reader's own time with the entries is no silence.
            self._heard_at_s = time.monotonic()
        elif state is not None and state.end is not None:
            self.ended = True
            yield StreamEntry(self.last_id, terminal_event(state.end))
        elif self._timeout is not None and self._silent_s() > self._timeout:
            raise TimeoutError(f"no event of job {self._job_id} within {self._timeout} s")

    def _silent_s(self) -> float:
        return time.monotonic() - self._heard_at_s
