"""What becomes of a job that is stopped before it reaches the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.contract import Cancelled, Tokens, encode_event
from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.engine.interface import Death, EngineDied
from llorch_worker.engine.process.engine_process import RemoteGeneration
from llorch_worker.settings import Settings
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.delivery import Delivery
from llorch_worker.worker.engine_loader import EngineLoader, Loaded
from llorch_worker.worker.job_runner import HandedBack
from llorch_worker.worker.residency import Residency
from tests.latch import Latch
from tests.services import RedisServer
from tests.worker.test_publisher import claimed

JOB_ID = "job"


@pytest.fixture
def active_jobs() -> ActiveJobs:
    jobs = ActiveJobs()
    jobs.expect(JOB_ID)
    return jobs


@pytest.fixture
def delivery(redis_server: RedisServer) -> Iterator[Delivery]:
    with connect(redis_server.url) as store:
        claim = claimed(store, JOB_ID)
        HELD_CLAIMS.add(claim)
        yield Delivery(claim, {"prompt": "x"})
        HELD_CLAIMS.discard(claim)
        store.delete(keys.job(JOB_ID), keys.events(JOB_ID))


@pytest.fixture
def residency(redis_server: RedisServer, active_jobs: ActiveJobs) -> Iterator[Residency]:
    """A toy engine with all that surrounds it but Celery."""
    settings = Settings(redis_url=redis_server.url, model=STORY_MODEL, model_name="toy")
    place = Assignment("toy")
    loader = EngineLoader(
        settings,
        place,
        engine_class="tests.toy_engine:ToyEngine",
        max_sequences=2,
        report=lambda _: None,
    )
    residency = Residency(
        [Loaded(loader.load(), 0.0)],
        {"toy": loader},
        settings,
        "w@test",
        active_jobs,
        place,
        on_lost_card=lambda: None,
    )
    residency.start()
    yield residency
    residency.close()


@pytest.mark.parametrize(
    ("stop", "error"), [(ActiveJobs.hand_back, HandedBack), (ActiveJobs.cancel, Cancelled)]
)
def test_a_job_that_is_stopped_before_it_runs_ends_as_the_stop_asks(
    residency: Residency,
    active_jobs: ActiveJobs,
    delivery: Delivery,
    stop: Callable[[ActiveJobs, str], None],
    error: type[Exception],
) -> None:
    stop(active_jobs, JOB_ID)
    with pytest.raises(error):
        residency.runner_of(delivery.claim).run(delivery)


def test_a_job_that_begins_while_the_worker_leaves_is_handed_back(
    residency: Residency, active_jobs: ActiveJobs, delivery: Delivery
) -> None:
    active_jobs.forget(JOB_ID)
    active_jobs.hand_back_all()
    with pytest.raises(HandedBack):
        residency.runner_of(delivery.claim).run(delivery)


def test_a_job_of_another_model_that_is_handed_back_keeps_its_tokens(
    residency: Residency, active_jobs: ActiveJobs, delivery: Delivery, redis_server: RedisServer
) -> None:
    begun = Tokens(index=0, ids=(1,), text="of no model that is served here ")
    delivery = replace(delivery, claim=replace(delivery.claim, first=False))
    with connect(redis_server.url) as store:
        store.xadd(keys.events(JOB_ID), {"event": encode_event(begun)}, id="1-0")
        active_jobs.hand_back(JOB_ID)
        with pytest.raises(HandedBack):
            residency.runner_of(delivery.claim).run(delivery)
        assert len(store.xrange(keys.events(JOB_ID))) == 1


def test_the_engine_hears_that_a_client_reads_the_job(
    residency: Residency,
    delivery: Delivery,
    redis_server: RedisServer,
    latch: Latch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: SimpleQueue[bool] = SimpleQueue()
    monkeypatch.setattr(RemoteGeneration, "note_read", lambda _, is_read: heard.put(is_read))
    claim = replace(delivery.claim, list_key="llorch.toy")
    asked = Delivery(claim, {"prompt": latch.prompt(after=1), "max_tokens": 2})
    with connect(redis_server.url) as store, store.pubsub() as reader, ThreadPoolExecutor() as pool:
        reader.subscribe(keys.events_channel(0, JOB_ID))
        assert reader.get_message(timeout=60)
        with latch:
            running = pool.submit(residency.runner_of(claim).run, asked)
            assert heard.get(timeout=60)
        assert running.result(60).usage.completion == 2


def test_a_job_that_comes_to_an_engine_of_whose_death_nobody_knows_yet_is_handed_back(
    residency: Residency, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: object, **__: object) -> None:
        raise EngineDied(Death("killed", "signal SIGKILL"))

    monkeypatch.setattr(residency.seats[0].engine, "submit", submit)
    with pytest.raises(HandedBack):
        residency.runner_of(delivery.claim).run(delivery)
