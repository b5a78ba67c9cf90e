"""Claims whose reply was lost: Redis made them, but this process does not know of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker import keys
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.scripts import run_script, text


class UnheardClaims:
    """Returns unheard claims to their queues before the next claim.

    Nobody runs such a job or renews its lease. If it lapsed, the job would come back late, with an
    attempt and a death counted.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        """When the claim began whose reply was lost, by this process' monotonic clock."""

    @contextmanager
    def around_claim(self, client: Redis, worker: str) -> Iterator[None]:
        """Wraps a call that claims jobs for ``worker``, this process' node name."""
        if self._since_s is not None:
            _hand_back(client, worker, self._since_s)
            self._since_s = None
        began_s = time.monotonic()
        try:
            yield
        except (NoConnection, NoReply):
            self._since_s = began_s
            raise


def _hand_back(client: Redis, worker: str, since_s: float) -> None:
    seconds, microseconds = client.time()
    # Only what was claimed since: a dead worker may have had the same name, and its jobs must
    # count their attempts.
    since_ms = math.floor(seconds * 1e3 + microseconds / 1e3 - (time.monotonic() - since_s) * 1e3)
    held = {(claim.job_id, claim.fence) for claim in HELD_CLAIMS.all()}
    leased: list[Any] = client.zrange(keys.LEASES, 0, -1)
    job_ids = list(map(text, leased))
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(keys.job(job_id), "fence", "history")
        records = pipe.execute()
    unheard = []
    for job_id, (fence, history) in zip(job_ids, records, strict=True):
        last_claim = text(history or "").rstrip("\n").rpartition("\n")[2]
        claimant, _, claimed_ms = last_claim.rpartition(" ")
        its_own = claimant == worker and int(claimed_ms) >= since_ms
        if its_own and (job_id, int(fence)) not in held:
            unheard.append((int(fence), job_id))
    # Latest first: each goes to the head of its queue, so the earliest ends up in front.
    for fence, job_id in sorted(unheard, reverse=True):
        run_script(client, "release", [job_id, fence, "queued", 0])


UNHEARD_CLAIMS = UnheardClaims()
"""One per process, like :data:`HELD_CLAIMS`, because channels end with their connection."""
