"""What the submitter of a request keeps, wherever the engine runs. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from llorch_worker.contract import Event, GenerationRequest, GenerationResult, LlorchError
from llorch_worker.contract.events import TERMINAL_EVENTS

logger = logging.getLogger(__name__)


class GenerationHandle:
    """The events and the one result of a request. Any thread may call the public methods."""

    def __init__(
        self, id: str, request: GenerationRequest, on_event: Callable[[Event], None] | None
    ) -> None:
        self.id = id
        self.request = request
        self._on_event = on_event
        self._changed = threading.Condition()
        self._events: list[Event] = []
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
            with self._changed:
                while len(self._events) == index:
                    self._changed.wait()
                fresh = self._events[index:]
            for event in fresh:
                yield event
                if isinstance(event, TERMINAL_EVENTS):
                    return
            index += len(fresh)

    def cancel(self) -> None:
        """Asks the engine to stop within one step. Does nothing once the generation is done."""
        if not self.done:
            self._request_cancel()

    def result(self, timeout: float | None = None) -> GenerationResult:
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

    # Its engine's side -----------------------------------------------------------------------

    def _request_cancel(self) -> None:
        raise NotImplementedError

    def _read_result(self) -> GenerationResult:
        """Called by the threads that wait for it."""
        raise NotImplementedError

    def _emit(self, event: Event) -> None:
        if self._on_event is None:
            with self._changed:
                self._events.append(event)
                self._changed.notify_all()
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the event callback of job %s failed; it is cancelled", self.id)
            self.cancel()
