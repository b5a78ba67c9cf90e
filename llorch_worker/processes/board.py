"""Memory that an engine shares with its keeper: a sign of life, and whose jobs it has in hand.

Nothing is sent for it, and it survives the engine, however that ends.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable
from typing import Final, Self

from llorch_worker.processes.spawn import memory_file

_WORD: Final = 8
_HEARTBEAT, _WRITES, _BANKS = 0, 1, 2
"""Places of words: monotonic ns of the last sign of life, 0 at rest; how often the handles were
written, of which the last bit says in which bank; the banks, each a count and then handles."""


class Board:
    """The engine writes; any process reads, without a lock.

    Handles are written to the bank that nobody reads before the count of writes says that it is
    the one to read, so that a death amid a write leaves the handles of before.
    """

    def __init__(self, most_handles: int, descriptor: int | None = None) -> None:
        """``most_handles``: how many jobs are in hand at most; beyond, the first are kept.
        ``descriptor``: of shared memory with :meth:`size_bytes`; None: this process' own."""
        size_bytes = self.size_bytes(most_handles)
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, size_bytes)
        self._words = memoryview(self._memory).cast("q")
        self._most = most_handles
        self._writing = threading.Lock()
        self._launched: tuple[int, ...] = ()
        self._taken: dict[int, None] = {}

    @staticmethod
    def size_bytes(most_handles: int) -> int:
        return _WORD * (_BANKS + 2 * (1 + most_handles))

    @classmethod
    def shared(cls, most_handles: int) -> tuple[Self, int]:
        """A new board and the descriptor of its memory, for another process. The caller closes
        it."""
        descriptor = memory_file("llorch-board")
        os.truncate(descriptor, cls.size_bytes(most_handles))
        return cls(most_handles, descriptor), descriptor

    # The engine's side ------------------------------------------------------------------------

    def beat(self) -> None:
        """There is work, and the engine makes progress."""
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def rest(self) -> None:
        """The engine waits: it has nothing to do, or its keeper reads nothing."""
        self._words[_HEARTBEAT] = 0

    def launch(self, handles: Iterable[int]) -> None:
        """The jobs of the steps that are not delivered, before the last of these is launched."""
        launched = tuple(handles)
        if launched != self._launched:
            with self._writing:
                self._launched = launched
                self._write()

    def take_in(self, handle: int) -> None:
        """A job is being taken in: its text is read, its grammar compiled."""
        with self._writing:
            self._taken[handle] = None
            self._write()

    def taken_in(self, handle: int) -> None:
        with self._writing:
            self._taken.pop(handle, None)
            self._write()

    def _write(self) -> None:
        words, writes = self._words, self._words[_WRITES] + 1
        handles = list(dict.fromkeys((*self._taken, *self._launched)))[: self._most]
        at = self._bank(writes)
        words[at] = len(handles)
        for place, handle in enumerate(handles, at + 1):
            words[place] = handle
        words[_WRITES] = writes

    # The keeper's side ------------------------------------------------------------------------

    @property
    def last_beat(self) -> int:
        """Another number after each sign of life."""
        return self._words[_HEARTBEAT]

    def stalled_for_s(self) -> float:
        """Seconds since the last sign of life; 0.0 at rest."""
        beat_ns = self._words[_HEARTBEAT]
        return max(0, time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else 0.0

    def in_hand(self) -> tuple[int, ...]:
        """The handles of the jobs that the engine has in hand."""
        words = self._words
        while True:
            writes = words[_WRITES]
            at = self._bank(writes)
            # What corrupts an engine's memory may write here too.
            count = max(0, min(words[at], self._most))
            handles = tuple(words[at + 1 : at + 1 + count])
            # After two more writes the bank is another's.
            if words[_WRITES] == writes:
                return handles

    def close(self) -> None:
        """Gives the memory back; nothing can be read or written any more."""
        self._words.release()
        self._memory.close()

    def _bank(self, writes: int) -> int:
        return _BANKS + (writes & 1) * (1 + self._most)
