"""Celery's events, sent while somebody listens.

Celery publishes some events for every job and a heartbeat every two seconds, whether or not Flower
or ``celery events`` is there. Redis tells how many subscribers got an event, so a worker that
reaches nobody only probes: with a heartbeat every few seconds, and with the event of a job now and
then. Flower and ``celery events`` broadcast a control command when they begin to listen, which ends
the silence at once: see :mod:`.control`.
"""

from __future__ import annotations

import time
from typing import Any

from celery.app.events import Events
from celery.events import EventDispatcher, group_from

PROBE_S = {"worker": 5.0, "task": 60.0}
"""How long nothing is sent to nobody. Who listens to all events hears heartbeats too."""


class HeardDispatcher(EventDispatcher):  # type: ignore[misc]
    """Sends an event if the last one of its group was heard."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._silent_until_s: dict[str, float] = {}
        self._listeners = 0
        super().__init__(*args, **options)

    def send(self, type: str, *args: Any, **fields: Any) -> Any:
        if time.monotonic() < self._silent_until_s.get(group_from(type), 0.0):
            return None
        return super().send(type, *args, **fields)

    def end_silence(self) -> None:
        """Somebody begins to listen."""
        self._silent_until_s.clear()

    def _publish(self, event: Any, producer: Any, routing_key: str, **options: Any) -> None:
        if producer is None:
            return
        super()._publish(event, producer, routing_key, **options)
        heard = getattr(producer.channel, "heard_by", None)
        group = routing_key.partition(".")[0]
        if group == "worker" and heard is not None:
            if heard > self._listeners:
                self.end_silence()
            self._listeners = heard
        if heard == 0 and group in PROBE_S:
            self._silent_until_s[group] = time.monotonic() + PROBE_S[group]


class HeardEvents(Events):  # type: ignore[misc]
    """``app.events`` with that dispatcher."""

    dispatcher_cls = f"{__name__}:HeardDispatcher"
