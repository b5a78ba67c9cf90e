"""Listens to Celery's events."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, Self

from celery import Celery


class Monitor(threading.Thread):
    """Receives every event, as Flower does, or those of a ``routing_key`` such as ``task.#``."""

    def __init__(self, app: Celery, routing_key: str = "#") -> None:
        super().__init__(daemon=True)
        self.events: list[dict[str, Any]] = []
        self._connection = app.connection_for_read()
        self._receiver = app.events.Receiver(
            self._connection, handlers={"*": self.events.append}, routing_key=routing_key
        )
        self.listening = threading.Event()
        self._stop_asked = threading.Event()

    def run(self) -> None:
        with self._receiver.consumer_context() as (connection, _, _):
            while not self._stop_asked.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.2)
                # kombu subscribes when it first drains.
                self.listening.set()

    def __enter__(self) -> Self:
        self.start()
        self.listening.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_asked.set()
        self.join()
        self._connection.release()

    def saw(self, kind: str, job_id: str) -> bool:
        return any(e["type"] == kind and e.get("uuid") == job_id for e in list(self.events))
