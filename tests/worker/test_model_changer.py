"""What a seat that changes or reloads its model tells others, and what it does when it is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry, residents
from llorch_worker.broker.fleet.residents import Note
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.client import Client
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.engine.process.surveying import Surveyed
from llorch_worker.settings import Settings
from llorch_worker.telemetry.metrics.worker_metrics import WorkerMetrics
from llorch_worker.worker import model_changer
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.engine_loader import MOST_CONTEXT, EngineLoader, Loaded
from llorch_worker.worker.model_changer import ModelChanger
from llorch_worker.worker.residency import Residency
from llorch_worker.worker.seat import Seat
from tests.broker.fleet.test_registry import card
from tests.broker.steps import claim_on
from tests.services import RedisServer, run_python
from tests.waiting import wait_until

FIRST_LOAD_S = 0.25


@contextmanager
def seat_of(redis_url: str, **settings: Any) -> Iterator[tuple[Seat, ModelChanger]]:
    """The one seat of a worker of a and b, which has a. It looks when it is told to."""
    with seats_of(redis_url, "ab", "a", **settings) as [seat]:
        assert seat.changer is not None
        yield seat, seat.changer


@contextmanager
def seats_of(redis_url: str, models: str, kept: str, **settings: Any) -> Iterator[tuple[Seat, ...]]:
    """Those of a worker of these models, a letter each, of which it has ``kept``."""
    with residency_of(redis_url, models, kept, **settings) as residency:
        yield residency.seats


@contextmanager
def residency_of(redis_url: str, models: str, kept: str, **settings: Any) -> Iterator[Residency]:
    place = Assignment("toy")
    files = ",".join(f"{name}.gguf" for name in models)
    own = Settings(redis_url=redis_url, models=files, min_resident_s=0, **settings)
    loaders = {
        name: EngineLoader(
            Settings(redis_url=redis_url, model=STORY_MODEL, model_name=name),
            place,
            engine_class="tests.toy_engine:ToyEngine",
            max_sequences=2,
            report=lambda _: None,
        )
        for name in models
    }
    for loader in loaders.values():
        loader.surveyed = Surveyed(MOST_CONTEXT)
    residency = Residency(
        [Loaded(loaders[name].load(), FIRST_LOAD_S) for name in kept],
        loaders,
        own,
        "w@test",
        ActiveJobs(),
        place,
        on_lost_card=lambda: None,
        claim_again=[lambda: None] * len(kept),
    )
    for seat in residency.seats:
        seat.start()
    try:
        yield residency
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


def test_a_seat_without_jobs_ends_its_engine_although_jobs_of_another_seat_wait(
    own_server: RedisServer,
) -> None:
    with (
        seats_of(own_server.url, "ab", "ab", idle_unload_s=600, resident=2) as (seat, other),
        Client(own_server.url) as client,
    ):
        assert seat.changer is not None
        assert other.changer is not None
        other.announcer.attempt()
        client.submit(model="b", prompt="x", max_tokens=1)
        for changer in (seat.changer, other.changer):
            changer._busy_at_s -= 601
        other.changer.attempt()
        seat.changer.attempt()
        assert (seat.is_ready, other.is_ready) == (False, True)


@pytest.mark.parametrize("away", [None, "the engine does not start"])
def test_a_seat_leaves_a_model_to_a_worker_that_has_it_alone_while_that_has_an_engine(
    own_server: RedisServer, away: str | None
) -> None:
    with (
        seat_of(own_server.url) as (seat, changer),
        connect(own_server.url) as store,
        Client(own_server.url) as client,
    ):
        seat.announcer.attempt()
        changer._load_s |= {"a": 60.0, "b": 60.0}  # no help with one job
        registry.announce(store, card("s@test", "b").model_copy(update={"away": away}))
        client.submit(model="b", prompt="x", max_tokens=1)
        changer.attempt()
        assert (seat.is_ready, seat.model) == (True, "a" if away is None else "b")
        # What it has left is nobody's only if nobody else keeps it.
        registry.announce(store, card("s@test", "b"))
        for model in "ba":
            changer.ask(model)
            changer.attempt()
        assert "b" not in residents.read(store).left_s


def test_a_model_that_another_worker_has_alone_is_no_turn_that_comes_late(
    own_server: RedisServer,
) -> None:
    with seat_of(own_server.url, max_wait_s=1) as (seat, changer), connect(own_server.url) as store:
        changer._load_s |= {"a": 60.0, "b": 60.0}
        changer.attempt()
        assert seat.late_s > 0
        registry.announce(store, card("s@test", "b"))
        changer.attempt()
        assert seat.late_s == 0


def test_a_seat_whose_next_model_does_not_load_has_its_name_and_counts_its_failures(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> NoReturn:
        raise ModelLoadFailed("no such file")

    with residency_of(own_server.url, "ab", "a") as residency, connect(own_server.url) as store:
        [seat] = residency.seats
        changer = seat.changer
        assert changer is not None
        metrics = WorkerMetrics(("a", "b"), residency._worker_figures).registry

        def counted(what: str, model: str, **labels: str) -> float | None:
            named = {"model_name": model, "engine": "0"} | labels
            return metrics.get_sample_value(f"llorch_{what}", named)

        def failures(model: str) -> float | None:
            return counted("engine_deaths_total", model, reason="load")

        seat.job_runner.deliveries["a", "attempts"] += 3
        assert [failures(model) for model in "ab"] == [0, 0], "an alert needs a 0 before the 1"
        monkeypatch.setattr(changer._loaders["b"], "load", fail)
        changer.ask("b")
        changer.attempt()
        assert seat.status().startswith("b on toy: the engine does not start: no such file")
        assert residency.stats().keys() == {"b"}
        assert seat.stats()["model"] == "b"
        assert seat.stats()["set_aside"] == {"b": "no such file"}
        seat.announcer.attempt()
        [card] = registry.workers(store)
        assert (card.model, card.max_context, card.fingerprint) == ("b", MOST_CONTEXT, "")
        changer.ask("a")

        def is_back() -> bool:
            changer.attempt()  # not while it tries b once more
            return seat.is_ready

        wait_until(is_back)
        assert seat.model == "a"
        # Since then nothing tries b.
        failed = seat.stats()["deaths"]
        assert failed > 0
        assert [failures(model) for model in "ab"] == [0, failed]
        assert [counted("job_attempts_total", model) for model in "ab"] == [3, 0]
        # What is the whole worker's has one label from its start to its end.
        monkeypatch.undo()
        changer._aside.clear()
        changer.ask("b")
        changer.attempt()
        assert seat.model == "b"
        assert [counted("job_attempts_total", model) for model in "ab"] == [3, 0]
        assert counted("fenced_writes_total", "a") is not None
        assert counted("fenced_writes_total", "b") is None


CHANGES = """
import gc, os, threading
import psutil
from llorch_worker.worker import model_changer
from tests.waiting import wait_until
from tests.worker.test_model_changer import seat_of

model_changer.LOOK_S = 0.01
process = psutil.Process()
rss, files = [], []

def held():
    gc.collect()
    threads = sorted(each.name for each in threading.enumerate())
    return [threads, len(process.children())]

def settled():
    # The threads of the engine before, and what announces a change, end soon.
    names = held()[0]
    return len({*names}) == len(names) and not any(name.startswith("Thread-") for name in names)

with seat_of(os.environ["LLORCH_REDIS_URL"]) as (seat, changer):
    for number in range(6):
        changer.ask("ba"[number % 2])
        changer.attempt()
        assert seat.is_ready and seat.model == "ba"[number % 2]
        wait_until(settled)
        if number < 2:
            level = held()
        wait_until(lambda: held() == level, what=f"{held()} to be {level}")
        rss.append(process.memory_info().rss)
        files.append(process.num_fds())
print([rss[1], rss[-1], files[1], files[-1]])
"""


def test_a_keeper_grows_by_no_change_of_its_model(own_server: RedisServer) -> None:
    """An engine's memory goes with its process; of what the keeper had for it nothing stays."""
    before, after, files_before, files_after = run_python(CHANGES, own_server.url)
    assert after < 1.02 * before
    # Less than one a change. Threads that ask Redis at once may have opened another connection.
    assert files_after < files_before + 4
