"""What a seat that changes or reloads its model tells others, and what it does when it is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import residents
from llorch_worker.broker.fleet.residents import Note
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.client import Client
from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.engine.process.surveying import Surveyed
from llorch_worker.settings import Settings
from llorch_worker.worker import model_changer
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.engine_loader import MOST_CONTEXT, EngineLoader, Loaded
from llorch_worker.worker.model_changer import ModelChanger
from llorch_worker.worker.residency import Residency
from llorch_worker.worker.seat import Seat
from tests.broker.steps import claim_on
from tests.services import RedisServer
from tests.waiting import wait_until

FIRST_LOAD_S = 0.25


@contextmanager
def seat_of(redis_url: str, **settings: Any) -> Iterator[tuple[Seat, ModelChanger]]:
    """The one seat of a worker of a and b, which has a. It looks when it is told to."""
    place = Assignment("toy")
    own = Settings(redis_url=redis_url, models="a.gguf,b.gguf", min_resident_s=0, **settings)
    loaders = {
        name: EngineLoader(
            Settings(redis_url=redis_url, model=STORY_MODEL, model_name=name),
            place,
            engine_class="tests.toy_engine:ToyEngine",
            max_sequences=2,
            report=lambda _: None,
        )
        for name in "ab"
    }
    loaders["b"].surveyed = Surveyed(MOST_CONTEXT)
    loaded = [Loaded(loaders["a"].load(), FIRST_LOAD_S)]
    residency = Residency(
        loaded, loaders, own, "w@test", ActiveJobs(), place, on_lost_card=lambda: None
    )
    [seat] = residency.seats
    assert seat.changer is not None
    seat.start()
    try:
        yield seat, seat.changer
    finally:
        residency.close()


def note_of(redis_url: str) -> Note:
    with connect(redis_url) as client:
        [note] = residents.read(client).of_workers
    return note


def test_a_seat_that_reloads_stays_noted_and_no_other_waits_for_its_change(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_changer, "LOOK_S", 0.01)
    with seat_of(own_server.url) as (seat, changer):
        changer.attempt()
        before = note_of(own_server.url)
        assert before.kept_s >= 0
        with seat.engine.moving:

            def is_noted_again() -> bool:
                changer.attempt()
                return note_of(own_server.url).seen_ms > before.seen_ms

            wait_until(is_noted_again)
            assert (during := note_of(own_server.url)).kept_s < 0
        assert during.resident == "a"
        assert during.may_serve("b")
        changer.attempt()
        assert note_of(own_server.url).kept_s >= 0


def test_a_seat_tells_what_it_will_load_for_as_long_as_its_jobs_may_still_end(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_changer, "LOOK_S", 0.01)
    claim = replace(claim_on("job"), list_key="llorch.a")
    with seat_of(own_server.url, max_wait_s=600) as (seat, changer):
        assert seat.engine.load_s == FIRST_LOAD_S
        HELD_CLAIMS.add(claim)
        try:
            changer.ask("b")
            changes = threading.Thread(target=changer.attempt)
            changes.start()
            wait_until(lambda: changer.changing)
            first = wait_until(lambda: (note := note_of(own_server.url)).resident == "b" and note)
            wait_until(lambda: note_of(own_server.url).seen_ms > first.seen_ms)
            assert seat.model == "a"
        finally:
            HELD_CLAIMS.discard(claim)
        changes.join()
        assert seat.model == "b"
        assert seat.engine.load_s not in (FIRST_LOAD_S, 0.0)


def test_a_pinned_model_that_somebody_unloads_comes_back_for_its_jobs_alone(
    own_server: RedisServer,
) -> None:
    with (
        seat_of(own_server.url, pin="a") as (seat, changer),
        Client(own_server.url) as client,
    ):
        seat.announcer.attempt()
        changer.ask(None)
        changer.attempt()
        assert not seat.is_ready
        client.submit(model="b", prompt="x", max_tokens=1)
        changer.attempt()
        assert not seat.is_ready
        client.submit(model="a", prompt="x", max_tokens=1)
        changer.attempt()
        assert (seat.is_ready, seat.model) == (True, "a")
