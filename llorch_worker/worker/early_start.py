"""A generation that began before the thread that is to wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from llorch_worker.contract import Event
from llorch_worker.worker.resident_engine import ResidentGeneration


class EarlyStart:
    """Keeps what the generation tells until its thread is there.

    Nothing of it reaches Redis before, so that one which Celery does not run after all leaves no
    trace.
    """

    def __init__(self) -> None:
        self._untold: list[Event] = []
        self._tell: Callable[[Event], None] = self._untold.append
        self._lock = threading.Lock()
        self._generation: ResidentGeneration | None = None
        self._error: BaseException | None = None

    def begin(self, submit: Callable[[Callable[[Event], None]], ResidentGeneration]) -> bool:
        """``submit`` hands the job to the engine, with where its events are to go; False where it
        raises."""
        try:
            self._generation = submit(self._on_event)
        except BaseException as error:  # noqa: BLE001 - the thread that follows ends the job with it
            self._error = error
        return self._generation is not None

    def follow(self, tell: Callable[[Event], None]) -> ResidentGeneration:
        """The generation, all of whose events go to ``tell``, those that it told already first.

        Raises what ``submit`` raised.
        """
        if self._error is not None:
            raise self._error
        assert self._generation is not None
        with self._lock:
            for event in self._untold:
                tell(event)
            self._tell = tell
        return self._generation

    def withdraw(self) -> None:
        """Ends it; nobody is to hear of it."""
        if self._generation is not None:
            self._generation.cancel()

    def _on_event(self, event: Event) -> None:
        with self._lock:
            self._tell(event)
