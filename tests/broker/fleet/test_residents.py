"""The notes by which workers of several models decide."""

from __future__ import annotations

import redis

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import residents
from llorch_worker.broker.fleet.residents import Note


def test_of_two_decisions_from_the_same_notes_one_counts(store: redis.Redis) -> None:
    first, second = (Note(worker=name, resident="a") for name in ("w1", "w2"))
    for note in (first, second):
        residents.renew(store, note, residents.read(store).now_ms)
    seen = residents.read(store)
    moves = first.model_copy(update={"resident": "b", "kept_s": -5.0})
    assert residents.decide(store, moves, seen, leaves=None)
    assert not residents.decide(store, second, seen, leaves=None)
    seen = residents.read(store)
    assert [(note.worker, note.resident) for note in seen.of_workers] == [("w1", "b"), ("w2", "a")]
    assert residents.decide(store, second, seen, leaves="a")
    assert residents.read(store).left_s["a"] >= 0


def test_a_worker_that_is_silent_decides_nothing_and_is_forgotten(store: redis.Redis) -> None:
    now_ms = residents.read(store).now_ms
    silent_s = {"w1": 0.0, "w2": residents.GONE_AFTER_S + 1, "w3": residents.FORGOTTEN_AFTER_S + 1}
    for name, seconds in silent_s.items():
        residents.renew(store, Note(worker=name), now_ms - round(1e3 * seconds))
    store.hset(keys.RESIDENTS, "w4", "nonsense")
    assert [note.worker for note in residents.read(store).of_workers] == ["w1"]
    assert set(store.hkeys(keys.RESIDENTS)) == {"w1", "w2"}
    residents.withdraw(store, "w1")
    assert residents.read(store).of_workers == ()


def test_a_decision_from_notes_that_redis_has_lost_is_made_anew(store: redis.Redis) -> None:
    note = Note(worker="w1", resident="a")
    assert residents.decide(store, note, residents.read(store), leaves=None)
    seen = residents.read(store)
    store.delete(keys.RESIDENTS, keys.RESIDENTS_FENCE)
    assert not residents.decide(store, note, seen, leaves=None)
