"""The claims that this process holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llorch_worker.broker.jobs.claims import Claim, Kind
from llorch_worker.contract import Event, Timings, Usage


@dataclass(frozen=True)
class LastEntries:
    """Events to write to a job's stream together with its end, from entry ``first_entry`` on."""

    first_entry: int
    events: Sequence[Event] = ()
    spent: tuple[Usage, Timings] | None = None
    """What a job that ends without a result has used."""
    resumed: bool = False
    """Whether the job had tokens of an earlier attempt."""


class HeldClaims:
    """Thread-safe. A claim stays here until its delivery is settled, even if it is lost meanwhile:
    its old fence makes a late write fail. A job that is claimed again before that has two claims
    here, one for each delivery.
    """

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._ended: set[Claim] = set()
        self._last_entries: dict[Claim, LastEntries] = {}
        self._renewed_s: dict[Claim, float] = {}
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
            self._renewed_s.pop(claim, None)

    def note_renewed(self, claims: Iterable[Claim], at_s: float) -> None:
        """Notes that Redis renewed the leases of these claims; ``at_s``: by this process' monotonic
        clock."""
        with self._lock:
            self._renewed_s |= {claim: at_s for claim in claims if claim.tag in self._claims}

    def unrenewed_s(self, claim: Claim) -> float:
        """Seconds since the claim certainly held."""
        with self._lock:
            return time.monotonic() - self._renewed_s.get(claim, claim.taken_s)

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

    def of(self, model: str, kind: Kind = "any") -> tuple[Claim, ...]:
        """Those of one model's jobs of a kind."""
        own = (claim for claim in self.all() if claim.model == model)
        return tuple(claim for claim in own if kind == "any" or claim.reads == (kind == "texts"))

    def running(self, model: str) -> tuple[Claim, ...]:
        """Those of one model's jobs that have not ended."""
        with self._lock:
            held = (claim for claim in self._claims.values() if claim not in self._ended)
            return tuple(claim for claim in held if claim.model == model)

    def __len__(self) -> int:
        return len(self._claims)


HELD_CLAIMS = HeldClaims()
"""One per process: channels and result backends, which kombu and Celery create, both use it, and
claims outlive them."""
