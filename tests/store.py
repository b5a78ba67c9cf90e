"""What a Redis of ours holds, for tests that look behind the client, or damage it."""

from __future__ import annotations

from typing import Any

from llorch_worker.broker import keys, queues

# redis-py's annotations cover all its clients at once.
Store = Any


def record_of(store: Store, job_id: str) -> dict[str, str]:
    """A job's record; empty if there is none."""
    found: dict[str, str] = store.hgetall(keys.job(job_id))
    return found


def write_record(store: Store, job_id: str, **fields: str | int) -> None:
    store.hset(keys.job(job_id), mapping=fields)


def message_of(store: Store, job_id: str) -> str:
    """A job's message; empty if Redis has none."""
    return store.get(keys.message(job_id)) or ""


def waiting_ids(store: Store, model: str = "toy") -> list[str]:
    """The jobs that wait for a worker, the next one first."""
    found: list[str] = store.zrange(keys.waiting(model), 0, -1)
    return found


def jobs_that_wait(store: Store, model: str = "toy") -> int:
    """How many wait, also in the inbox."""
    inbox: int = sum(store.llen(name) for name in queues.inbox_of(model))
    return inbox + len(waiting_ids(store, model))


def job_ids(store: Store) -> set[str]:
    """The ids of all jobs that have a record."""
    return {key.split(":")[2] for key in store.scan_iter(keys.job("*"), count=1000)}


def entries_of(store: Store, job_id: str) -> list[tuple[str, str]]:
    """A job's stream: each entry's id and event."""
    return [(entry_id, fields["event"]) for entry_id, fields in store.xrange(keys.events(job_id))]


def add_entry(store: Store, job_id: str, event: str, entry_id: str = "*") -> str:
    added: str = store.xadd(keys.events(job_id), {"event": event}, id=entry_id)
    return added


def lose_stream(store: Store, job_id: str) -> bool:
    """Deletes a job's stream; whether there was one."""
    return bool(store.delete(keys.events(job_id)))


def stored_result(store: Store, job_id: str) -> str | None:
    """A job's state or result as Celery's backend keeps it."""
    document: str | None = store.get(keys.result(job_id))
    return document


def store_result(store: Store, job_id: str, document: str, *, publish: bool = False) -> None:
    store.set(keys.result(job_id), document)
    if publish:
        store.publish(keys.result(job_id), document)


def traces(store: Store, job_id: str) -> set[str]:
    """Which of record, result and stream Redis still has of a job."""
    kinds = {"record": keys.job, "result": keys.result, "stream": keys.events}
    return {kind for kind, key in kinds.items() if store.exists(key(job_id))}


def lose(store: Store, job_id: str) -> None:
    """Deletes all that :func:`traces` finds, and the message."""
    store.delete(keys.job(job_id), keys.result(job_id), keys.events(job_id), keys.message(job_id))


def ttls(store: Store, job_id: str) -> tuple[int, int]:
    """How many seconds a job's record and its result live on; -1 is for ever."""
    return store.ttl(keys.job(job_id)), store.ttl(keys.result(job_id))


def id_for_key(store: Store, model: str, idempotency_key: str) -> str | None:
    """The id of the first job that was sent with a key."""
    found: str | None = store.get(keys.idempotency(model, idempotency_key))
    return found


def cancel_asked(store: Store, job_id: str) -> bool:
    return bool(store.exists(keys.cancel(job_id)))


def ask_cancel(store: Store, job_id: str) -> None:
    """Leaves the mark of a cancel, and tells nobody."""
    store.set(keys.cancel(job_id), 1)


def leases_in(store: Store) -> dict[str, float]:
    """When the lease of each claimed job ends, in ms."""
    return dict(store.zrange(keys.LEASES, 0, -1, withscores=True))


def held_ids(store: Store) -> set[str]:
    """The ids of the jobs that workers hold leases on."""
    return set(leases_in(store))


def set_leases(store: Store, until_ms: dict[str, float]) -> None:
    """Moves the ends of leases; a job without one gets none."""
    store.zadd(keys.LEASES, until_ms, xx=True)


def lapse(store: Store, *ids: str) -> None:
    """Ends the leases of these jobs, or of all: they are swept next."""
    if lapsed := ids or tuple(leases_in(store)):
        set_leases(store, {job_id: place for place, job_id in enumerate(lapsed)})


def follow_ups_in(store: Store) -> dict[str, float]:
    """When a worker may take up what follows the end of each job, in ms."""
    return dict(store.zrange(keys.FOLLOW_UPS, 0, -1, withscores=True))


def set_follow_ups(store: Store, due_ms: dict[str, float]) -> None:
    store.zadd(keys.FOLLOW_UPS, due_ms)


def letters_in(store: Store) -> list[str]:
    """The dead letters, newest first."""
    numbers = [entry.partition(" ")[0] for entry in store.lrange(keys.DEAD, 0, -1)]
    return [store.hget(keys.LETTERS, number) for number in numbers]


def add_letter(store: Store, letter: str) -> None:
    number = str(store.hlen(keys.LETTERS))
    store.hset(keys.LETTERS, number, letter)
    store.lpush(keys.DEAD, f"{number} {len(letter)} ")


def clear_letters(store: Store) -> None:
    store.delete(keys.DEAD, keys.LETTERS, keys.LETTERS_HELD)


def announce_model(store: Store, model: str, card: str) -> None:
    """Announces a model with this card's JSON."""
    store.hset(keys.MODELS, model, card)
