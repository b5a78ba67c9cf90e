"""The claims that this process holds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from llorch_worker.broker.claims import Claim
from llorch_worker.contract import Event


@dataclass(frozen=True)
class LastEntries:
    """Events to write to a job's stream together with its end, from entry ``first_entry`` on."""

    first_entry: int
    events: Sequence[Event] = ()


class HeldClaims:
    """Thread-safe. A claim stays here until its delivery is settled, even if it is lost meanwhile:
    its old fence makes a late write fail. A job that is claimed again before that has two claims
    here, one for each delivery.
    """

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._ended: set[Claim] = set()
        self._last_entries: dict[Claim, LastEntries] = {}
        self.fenced_writes = 0
        """Writes of tokens or results that Redis refused because their claim was lost."""
        # Reentrant: a signal handler may settle claims while its thread holds the lock.
        self._lock = threading.RLock()

    def add(self, claim: Claim) -> None:
        with self._lock:
            self._claims[claim.tag] = claim

    def discard(self, claim: Claim) -> None:
        with self._lock:
            self._claims.pop(claim.tag, None)
            self._ended.discard(claim)
            self._last_entries.pop(claim, None)

    def leave_entries(self, claim: Claim, entries: LastEntries) -> None:
        """Leaves events to be written with the job's end."""
        with self._lock:
            self._last_entries[claim] = entries

    def last_entries(self, claim: Claim) -> LastEntries:
        with self._lock:
            return self._last_entries.get(claim, LastEntries(1))

    def note_end(self, claim: Claim) -> None:
        """Notes that the result is stored and that storing it ended the claim."""
        with self._lock:
            self._ended.add(claim)

    def has_ended(self, claim: Claim) -> bool:
        with self._lock:
            return claim in self._ended

    def note_fenced(self) -> None:
        """Notes that Redis refused a write because its claim was lost."""
        with self._lock:
            self.fenced_writes += 1

    def get(self, delivery_tag: str) -> Claim | None:
        with self._lock:
            return self._claims.get(delivery_tag)

    def all(self) -> tuple[Claim, ...]:
        with self._lock:
            return tuple(self._claims.values())

    def running(self) -> tuple[Claim, ...]:
        """Those whose job has not ended."""
        with self._lock:
            return tuple(claim for claim in self._claims.values() if claim not in self._ended)

    def __len__(self) -> int:
        return len(self._claims)


HELD_CLAIMS = HeldClaims()
"""One per process: channels and result backends, which kombu and Celery create, both use it, and
claims outlive them."""
