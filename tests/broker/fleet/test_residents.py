"""The notes by which workers of several models decide."""

from __future__ import annotations

import redis

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import registry, residents
from llorch_worker.broker.fleet.residents import Note, Notes
from tests.broker.fleet.test_registry import card


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


def test_a_model_may_be_served_while_one_worker_has_it_or_tries_it() -> None:
    most = residents.MOST_FAILURES
    hopeless = Note(worker="w1", resident="b", load_s={"b": 1.0}, set_aside={"a": most})
    pinned = Note(worker="w2", resident="b", load_s={"b": 1.0}, pinned=True)
    for others, served in (
        ([], False),
        ([pinned], False),
        ([pinned.model_copy(update={"resident": "a"})], True),
        ([Note(worker="w3", load_s={"a": 1.0})], True),
        ([Note(worker="w3", set_aside={"a": most - 1})], True),
        ([Note(worker="w3", set_aside={"a": most})], False),
    ):
        seen = Notes((hopeless, *others), {}, 0, None)
        assert seen.may_serve("a") == served, others


def test_a_worker_of_one_model_keeps_it_while_it_has_an_engine_or_loads_one(
    store: redis.Redis,
) -> None:
    residents.renew(store, Note(worker="w1", resident="a"), residents.read(store).now_ms)
    for hostname, model, told in (
        ("s1", "a", {}),
        ("s2", "a", {"away": "the engine does not start"}),
        ("s3", "b", {"away": "the engine died", "loading": {"b": 0.5}}),
        ("s4", "c", {}),
        # Those of several, and their seats, write notes. These may be too old.
        ("w1", "a", {}),
        ("w2", "b", {"models": ("a", "b")}),
    ):
        registry.announce(store, card(hostname, model).model_copy(update=told))
    registry.announce(store, card("s5", "a"), leaving=True)
    seen = residents.read(store, ["a", "b"])
    kept = {note.worker: (note.resident, note.kept_s >= 0) for note in seen.of_workers}
    assert kept == {
        "s1": ("a", True), "s2": (None, False), "s3": ("b", False), "w1": ("a", True),
    }  # fmt: skip
    ours = [note for note in seen.of_workers if note.worker != "w1"]
    assert all(note.pinned for note in ours)
    assert seen.may_serve("a")
    assert seen.may_serve("b")
    # One whose engine does not start tries for as long as it lives.
    registry.withdraw(store, "a", "s1")
    residents.withdraw(store, "w1")
    registry.withdraw(store, "a", "w1")
    assert residents.read(store, ["a"]).may_serve("a")
    registry.withdraw(store, "a", "s2")
    assert not residents.read(store, ["a"]).may_serve("a")


def test_the_note_of_one_that_has_died_hides_no_worker_that_has_one_model_under_its_name(
    store: redis.Redis,
) -> None:
    silent_ms = round(1e3 * (residents.GONE_AFTER_S + 1))
    residents.renew(
        store, Note(worker="w1", resident="b"), residents.read(store).now_ms - silent_ms
    )
    registry.announce(store, card("w1", "a"))
    (seen,) = residents.read(store, ["a", "b"]).of_workers
    assert (seen.worker, seen.resident, seen.pinned) == ("w1", "a", True)
