"""How often jobs came to this worker, and how far they were."""

from __future__ import annotations

import threading

from llorch_worker.broker.claims import Claim


class Deliveries:
    """Totals since the worker's start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.attempts = 0
        """Jobs that began to run here."""
        self.redeliveries = 0
        """Of these, jobs of which this was not the first claim."""
        self.resumes = 0
        """Of these, jobs that already had tokens."""

    def note(self, claim: Claim, *, has_journal: bool) -> None:
        with self._lock:
            self.attempts += 1
            self.redeliveries += not claim.first
            self.resumes += has_journal
