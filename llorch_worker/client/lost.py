"""Noticing that Redis has lost a job, by FLUSHALL for example, or a restart without persistence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.results import StoredState, decode_state
from llorch_worker.contract import JobLost

GRACE_S = 2.0


class Trace:
    """What one reader knows of whether Redis still has the job.

    A job that runs is put back by its worker within a lease. ``known``: the job was enqueued; else
    it is known once there is a trace. A stock producer's job leaves none until a worker takes it.
    """

    def __init__(self, job_id: str, lease_s: float, *, known: bool) -> None:
        self._job_id = job_id
        self._patience_s = lease_s + GRACE_S
        self._known = known
        self._missing_since_s: float | None = None

    @property
    def is_missing(self) -> bool:
        """Whether Redis had no trace of the job when it was last asked, and the job was known."""
        return self._missing_since_s is not None

    def ask(self, pipe: Any) -> Any:
        """Adds the question for :meth:`state` to ``pipe``, which it returns."""
        pipe.get(keys.result(self._job_id))
        return pipe.hmget(keys.job(self._job_id), "state", "sent")

    def state(self, reply: Sequence[Any]) -> StoredState:
        """The job's stored state, from the reply to :meth:`ask`. Raises like :meth:`note`."""
        return decode_state(self.document(reply))

    def document(self, reply: Sequence[Any]) -> str | bytes | None:
        """The state as it is stored, from the reply to :meth:`ask`. Raises like :meth:`note`."""
        document, (mark, sent) = reply
        self.note(document is not None or waits_or_runs(mark, sent))
        return cast("str | bytes | None", document)

    def note(self, found: bool) -> None:
        """Notes a reply of Redis. Raises ``JobLost`` if there was no trace for a lease."""
        now_s = time.monotonic()
        if found:
            self._known, self._missing_since_s = True, None
        elif self._known:
            self._missing_since_s = self._missing_since_s or now_s
            if now_s - self._missing_since_s >= self._patience_s:
                raise JobLost(f"Redis has lost job {self._job_id}; submit it again")


def waits_or_runs(mark: str | None, sent: str | None) -> bool:
    """Whether a result may still come of a job whose record has this ``state`` and ``sent``. That
    of a job that has ended may have been deleted, and comes no more."""
    return mark != "ended" and (mark or sent) is not None
