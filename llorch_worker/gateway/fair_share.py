"""Whose work is next: each key has a fair share, and of one key's work the oldest comes first."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import redis.asyncio

from llorch_worker.broker.fleet import leases
from llorch_worker.broker.keys import Key
from llorch_worker.broker.scripts import run_script_async

MOST_DUE = 1000
"""Pieces that are looked at in one go."""


class Due(NamedTuple):
    """A piece of work whose time has come. ``owner`` is the name of a key, ``what`` and ``more``
    are fields of the piece's hash."""

    id: str
    owner: str
    what: str
    more: str = ""


async def due(
    client: redis.asyncio.Redis, work: str, longest_s: float, piece: Key, *fields: str
) -> list[Due]:
    """Up to ``MOST_DUE`` pieces of ``work``, the oldest first; ``fields`` of their hashes hold
    owner, ``what`` and perhaps ``more``, which are ``""`` where a hash has none. ``longest_s``: the
    longest time from now after which a piece may be due."""
    listing = leases.due(work, 0, MOST_DUE, latest_s=longest_s)
    ids = await run_script_async(client, *listing)
    # redis-py's annotations cover all its clients at once.
    server: Any = client
    async with server.pipeline(transaction=False) as pipe:
        for each in ids:
            pipe.hmget(piece(each), *fields)
        found = await pipe.execute() if ids else []
    return [
        Due(each, *(value or "" for value in values))
        for each, values in zip(ids, found, strict=True)
    ]


def fairly(pieces: Iterable[Due], under_way: Mapping[str, int], most: int) -> Sequence[Due]:
    """Up to ``most`` of ``pieces``, each of the owner who has the fewest ``under_way`` then."""
    waiting: dict[str, deque[Due]] = defaultdict(deque)
    for piece in pieces:
        waiting[piece.owner].append(piece)
    counts = Counter(under_way)
    chosen: list[Due] = []
    while waiting and len(chosen) < most:
        owner = min(waiting, key=lambda each: counts[each])
        chosen.append(waiting[owner].popleft())
        counts[owner] += 1
        if not waiting[owner]:
            del waiting[owner]
    return chosen
