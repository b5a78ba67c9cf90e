"""Watching a model's inbox, to which stock producers push.

One worker of each model, which holds a short lease, wakes another when a job comes there: see
:mod:`.wake_ups`. The woken worker claims it. If none does at once, the watcher moves it to the
jobs that wait. It also lets scheduled jobs wait whose time has come. Once a second it wakes a
worker for whatever waits, because one may have died with a wake-up.

If it dies itself, another takes the lease within eight seconds; meanwhile workers with room look by
themselves. Two watchers at a time do no harm.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError, WatchError

from llorch_worker.broker import keys, queues
from llorch_worker.broker.fleet.leases import Lease
from llorch_worker.broker.messages.message import head_of
from llorch_worker.broker.scripts import as_bytes, queue_script, run_script, text

LEASE_S = 5.0
KEEP_S = 3.0
"""How often the watcher renews it."""
TAKE_S = 3.0
"""How often the others try to become it."""
LOOK_S = 1.0
"""How often the watcher wakes a worker for whatever waits."""
STAGED_S = 60
"""How long Redis keeps the copy of a watcher that dies before its message is taken."""
MOST_TRIES = 5
"""How often a list may change while its last message is staged."""


def lease(client: Redis, model: str) -> Lease:
    """Whoever has it watches ``model``."""
    return Lease(client, keys.watch(model), LEASE_S)


def wake(client: Redis, model: str, lists: Iterable[str]) -> None:
    """Wakes a worker, because jobs have come to these lists of the inbox."""
    named = {queues.route(model, queues.priority_of(name)).queue for name in lists}
    full = map(keys.full_wake, filter(queues.is_high, named))
    for key in (*map(keys.wake, named), *full):
        # A key holds at most one wake-up.
        if client.lpush(key, 1) > 1:
            client.lpop(key)


def look(
    client: Redis,
    model: str,
    *,
    wakes_anyway: bool = False,
    on_repeated: Callable[[str], object] = lambda _: None,
) -> float | None:
    """Moves and wakes, with ``wakes_anyway`` also for jobs that woke a worker before. Returns
    after how many seconds to look again, because more is to be moved or a job is due; or None.

    ``on_repeated``: gets the ids of messages that were dropped because their jobs had ended, the
    first few.
    """
    asked = (model, int(wakes_anyway))
    reply = run_script(client, "watch", asked, queues.inbox_of(model))
    repeated = reply[2:]
    if left := text(reply[1]):
        # One a look, each of which takes tens of ms: whoever looks has more to do.
        reply = _take_large(client, model, (*asked, left))
        repeated += reply[2:]
    for job_id in repeated:
        on_repeated(text(job_id))
    if reply[1]:
        return 0.0
    return reply[0] / 1e3 if reply[0] >= 0 else None


def _take_large(client: Redis, model: str, asked: Sequence[str | int]) -> list[Any]:
    """Looks again at a list that was left, the last that is ``asked``. Its last message is read and
    staged by commands of their own, each of which copies it once."""
    left, lists, call = str(asked[-1]), queues.inbox_of(model), secrets.token_hex(8)
    try:
        for _ in range(MOST_TRIES):
            with client.pipeline() as pipe, suppress(WatchError):
                try:
                    pipe.watch(left)  # so that nothing happens if the list changes meanwhile
                    raw = as_bytes(pipe.lindex(left, -1) or "")
                    head = head_of(raw)
                    if head is None or len(head) > keys.APART_BYTES:
                        break
                    pipe.set(keys.staged(call), raw, ex=STAGED_S)
                    pipe.multi()
                    queue_script(pipe, "watch", (*asked, call, head, len(raw)), lists)
                    (reply,) = pipe.execute()
                except ResponseError:
                    break  # the server does not know the script any more, or has no memory
                return list(reply)
        return list(run_script(client, "watch", asked, lists))
    finally:
        client.delete(keys.staged(call))  # unless it is the job's now
