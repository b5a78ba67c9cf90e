"""The claims that this process holds."""

from __future__ import annotations

import threading

from llorch_worker.broker.claims import Claim


class HeldClaims:
    """Written by the channel that claims and settles; read by whoever writes for a job, and by the
    thread that renews the leases. A claim stays here until its job is settled, even when it was
    lost meanwhile: the old fence is what makes a late write fail.
    """

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._ended: set[Claim] = set()
        # Reentrant: a signal handler may settle claims while its thread is in here.
        self._lock = threading.RLock()

    def add(self, claim: Claim) -> None:
        with self._lock:
            self._claims[claim.job_id] = claim

    def discard(self, claim: Claim) -> None:
        with self._lock:
            if self._claims.get(claim.job_id) is claim:
                del self._claims[claim.job_id]
            self._ended.discard(claim)

    def note_end(self, claim: Claim) -> None:
        """Its result is stored and the claim ended with it: nothing is left to tell Redis."""
        with self._lock:
            self._ended.add(claim)

    def has_ended(self, claim: Claim) -> bool:
        with self._lock:
            return claim in self._ended

    def get(self, job_id: str) -> Claim | None:
        with self._lock:
            return self._claims.get(job_id)

    def all(self) -> tuple[Claim, ...]:
        with self._lock:
            return tuple(self._claims.values())

    def __len__(self) -> int:
        return len(self._claims)


HELD = HeldClaims()
"""kombu makes channels, and Celery result backends, by themselves and without a context; claims
outlive both. So the process has one such list."""
