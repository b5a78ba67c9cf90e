"""Leases: how the processes of a fleet share work, so that one does each piece at a time.

One piece, such as watching a model's queues, is a key that expires: :class:`Lease`. Many pieces of
a kind, such as webhooks, are a sorted set: id -> when somebody may take the piece; :func:`due`
takes some, and so moves that to the end of a lease. Times are by Redis' own clock. If it is set
back, what a dead process held is free in time. At ``maxmemory`` leases are taken, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis

from llorch_worker.broker.scripts import Argument, run_script


class Lease:
    """A piece of work that one process does at a time. Who neither renews nor leaves it keeps all
    from it for ``lease_s``."""

    def __init__(self, client: Redis, key: str, lease_s: float) -> None:
        self._redis = client
        self._key = key
        self._lease_ms = max(1, round(lease_s * 1e3))

    def take(self) -> bool:
        """Takes the work, if nobody has it."""
        left_ms = self._redis.pttl(self._key)
        if left_ms > self._lease_ms:
            # The clock was set back. A living holder will renew the lease, a dead one will not.
            self.renew()
        if left_ms >= 0:
            return False
        return bool(run_script(self._redis, "acquire", [self._lease_ms], [self._key]))

    def renew(self) -> bool:
        """False if the lease has lapsed."""
        return bool(self._redis.pexpire(self._key, self._lease_ms))

    def leave(self) -> None:
        """Leaves the work to others now."""
        self._redis.delete(self._key)


def due(
    work: str,
    lease_s: float,
    most: int,
    *,
    latest_s: float = 0,
    token: str = "",
    chosen: Sequence[str] = (),
) -> tuple[str, list[Argument], list[str]]:
    """A call of the script that takes up to ``most`` due pieces of ``work``, and returns their ids.

    ``latest_s``: the longest time from now after which a piece may be due, if not the lease;
    ``token``: the fence of the documents with these ids, so that whoever had them saves no more;
    ``chosen``: take these, if they are due, and not the earliest.
    """
    latest_ms = round((latest_s or lease_s) * 1e3)
    return "take_due", [round(lease_s * 1e3), most, latest_ms, token, *chosen], [work]
