"""Jobs that an older version left in Redis, moved to where this one looks.

It kept whole messages in lists: those of tenants, of suspects and of single workers, beside the
lists that stock producers know, and in the records of jobs that ran or waited for their ETA. Each
worker moves what it finds of its model when it starts. Nothing is done twice, so several may.
"""

from __future__ import annotations

from redis import Redis
from redis.exceptions import ResponseError

from llorch_worker.broker import keys
from llorch_worker.broker.queues import STEP_SEPARATOR, inbox_of, normal_queue, queues
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract.quantities import counted

MOVED_AT_ONCE = 500
_FIELD = '"takes_direct_jobs"'
"""In the cards of its workers alone."""
_TENANTS = f"{keys.PREFIX}tenants:"


def living(client: Redis, model: str) -> str | None:
    """A sentence, if workers of the older version serve ``model``: they would look elsewhere."""
    places = list(map(str, client.zrange(keys.live(model), 0, -1)))
    cards = client.mget(list(map(keys.worker, places))) if places else []
    older = [card for card in cards if card is not None and _FIELD in str(card)]
    if not older:
        return None
    return (
        f"{counted(len(older), 'worker')} of an older version of this package still "
        f"serve{'s' if len(older) == 1 else ''} {model}; stop them first: their jobs go on here"
    )


def move(client: Redis, model: str) -> int:
    """Moves all jobs; returns how many. Raises ``RedisError``."""
    moved = 0
    lists, states = _lists(client, model)
    for old, new in lists:
        while found := run_script(client, "move_list", [MOVED_AT_ONCE], [old, new]):
            moved += found
    scheduled = f"{normal_queue(model)}:scheduled", keys.scheduled(model)
    moved += _move_messages(client, model, scheduled[0], *scheduled)
    for running in (keys.LEASES, keys.FOLLOW_UPS):
        _move_messages(client, model, running)
    normal = normal_queue(model)
    client.delete(*states, f"{keys.PREFIX}passed:{model}", f"{keys.PREFIX}gone:{normal}")
    return moved


def _move_messages(client: Redis, model: str, held: str, *sets: str) -> int:
    try:
        ids = list(map(str, client.zrange(held, 0, -1)))
    except ResponseError:
        return 0  # somebody's key of another type
    for first in range(0, len(ids), MOVED_AT_ONCE):
        run_script(client, "move_messages", [model, *ids[first : first + MOVED_AT_ONCE]], sets)
    return len(ids)


def _lists(client: Redis, model: str) -> tuple[list[tuple[str, str]], list[str]]:
    """The lists of the older version in which jobs may be, with the inbox list of each; and the
    keys that name its tenants."""
    states: list[str] = []
    normal = normal_queue(model)
    places = list(map(str, client.zrange(keys.live(model), 0, -1)))
    own = [
        (f"{place}{name.removeprefix(normal)}", name)
        for place in places
        for name in inbox_of(model)
    ]
    shared = [(f"{normal}:suspects", normal)]
    for queue in queues(model):
        for low in ("", "9"):
            tenants = f"{queue}{STEP_SEPARATOR}{low}t"
            to = f"{queue}{STEP_SEPARATOR}{low}" if low else queue
            shared.append((tenants, to))
            state = f"{_TENANTS}{tenants}"
            if client.type(state) == "hash":
                names = [str(name) for name in client.hkeys(state) if str(name)[:1] not in "*/"]
                shared += [(f"{state}/{name}", to) for name in names]
            # Last, because it names the tenants' lists.
            states.append(state)
    found = [*shared, *own]
    with client.pipeline(transaction=False) as pipe:
        for old, _ in found:
            pipe.exists(old)
        exist = pipe.execute()
    return [each for each, exists in zip(found, exist, strict=True) if exists], states
