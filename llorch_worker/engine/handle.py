"""What the submitter of a request keeps, wherever the engine runs. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Generic

from llorch_worker.contract import Event, LlorchError
from llorch_worker.contract.events import TERMINAL_EVENTS
from llorch_worker.contract.kinds import Asked, Result
from llorch_worker.engine.told import TokensTold

logger = logging.getLogger(__name__)


class GenerationHandle(Generic[Asked, Result]):
    """The events and the one result of a request. Any thread may call the public methods."""

    def __init__(
        self,
        id: str,
        request: Asked,
        on_event: Callable[[Event], None] | None,
        on_tokens: Callable[[TokensTold], None] | None = None,
    ) -> None:
        """``on_tokens`` takes new tokens in place of ``on_event``."""
        self.id = id
        self.request = request
        self._on_event = on_event
        self._on_tokens = on_tokens
        self.is_read = on_tokens is None
        """Whether somebody reads its tokens as they come."""
        self._changed = threading.Condition()
        self._readers = 0
        """How many threads wait for events: most often none does."""
        self._events: list[Event | TokensTold] = []
        self._error: LlorchError | None = None
        # Separate from the events, because a token must not wake threads that wait for results.
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the terminal event has been emitted."""
        return self._finished.is_set()

    def events(self) -> Iterator[Event]:
        """All events from the first on, as they arrive; ends after the terminal event.

        Every call reads from the beginning. Raises ``RuntimeError`` if ``on_event`` has taken them:
        a token's event is 0.7 KB, of which a worker would keep those of all running jobs.
        """
        if self._on_event is not None:
            raise RuntimeError("the events go to on_event, and are not kept")
        return self._kept_events()

    def _kept_events(self) -> Iterator[Event]:
        index = 0
        while True:
            if len(self._events) == index:
                with self._changed:
                    self._readers += 1
                    while len(self._events) == index:
                        self._changed.wait()
                    self._readers -= 1
            fresh = self._events[index:]
            for each in fresh:
                event = each.event() if isinstance(each, TokensTold) else each
                yield event
                if isinstance(event, TERMINAL_EVENTS):
                    return
            index += len(fresh)

    def cancel(self) -> None:
        """Asks the engine to stop within one step. Does nothing once the generation is done."""
        if not self.done:
            self._request_cancel()

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the result and returns it.

        Raises:
            TimeoutError: no result after ``timeout`` seconds; the generation continues.
            LlorchError: the generation failed; ``Cancelled`` if it was cancelled.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"generation {self.id} has no result after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._read_result()

    def note_read(self, is_read: bool) -> None:
        """Notes whether somebody reads its tokens as they come. While nobody does, they may wait
        for each other. Those that go to ``on_tokens`` are read by nobody until this is called."""
        self.is_read = is_read

    # Its engine's side -----------------------------------------------------------------------

    def _request_cancel(self) -> None:
        raise NotImplementedError

    def _read_result(self) -> Result:
        """Called by the threads that wait for it."""
        raise NotImplementedError

    def _emit(self, event: Event) -> None:
        if self._on_event is None:
            self._keep(event)
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the event callback of job %s failed; it is cancelled", self.id)
            self.cancel()

    # Not an attribute that is one of its methods: that would keep each generation, and the vectors
    # of each job of texts, until Python collects cycles, of which an engine makes few.
    def _tell_tokens(self, told: TokensTold) -> None:
        if self._on_tokens is not None:
            self._on_tokens(told)
        elif self._on_event is None:
            self._keep(told)
        else:
            self._emit(told.event())

    def _keep(self, event: Event | TokensTold) -> None:
        self._events.append(event)
        # Whoever begins to wait from now on looks first.
        if self._readers:
            with self._changed:
                self._changed.notify_all()
