"""The only job of an idle worker is computed while Celery still does its bookkeeping for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from llorch_worker.broker import keys
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.connection import connect
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.client import Client
from llorch_worker.contract import (
    TASK_NAME,
    Cancelled,
    CancelledEvent,
    Event,
    Finished,
    GenerationResult,
    InternalError,
    InvalidRequest,
    Started,
    Tokens,
)
from llorch_worker.worker.celery import consumer
from llorch_worker.worker.celery.consumer import MOST_EARLY_BYTES, JobConsumer
from llorch_worker.worker.early_start import EarlyStart
from llorch_worker.worker.job_runner import HandedBack
from llorch_worker.worker.residency import Residency
from tests.latch import Latch
from tests.services import RedisServer, held_ids, running_worker, wait_until
from tests.worker.conftest import JOB

GET_S = 30
TOKENS = 3


class Generation:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def result(self, timeout: float | None = None) -> GenerationResult:
        raise AssertionError("nobody asks")


def tokens(index: int) -> Event:
    return Tokens(index=index, ids=(index,), text="x")


def test_what_was_told_before_comes_before_what_is_told_later() -> None:
    tell: list[Callable[[Event], None]] = []

    def submit(on_event: Callable[[Event], None]) -> Generation:
        tell.append(on_event)
        on_event(tokens(0))
        return Generation()

    early = EarlyStart()
    assert early.begin(submit)
    tell[0](tokens(1))
    told: list[Event] = []
    early.follow(told.append)
    tell[0](tokens(2))
    assert told == [tokens(0), tokens(1), tokens(2)]


def test_who_is_withdrawn_is_cancelled() -> None:
    generation = Generation()
    early = EarlyStart()
    assert early.begin(lambda _: generation)
    early.withdraw()
    assert generation.cancelled


def test_a_refusal_is_met_by_whoever_follows() -> None:
    def submit(_: Callable[[Event], None]) -> Generation:
        raise InternalError("no")

    early = EarlyStart()
    assert not early.begin(submit)
    early.withdraw()
    with pytest.raises(InternalError, match="no"):
        early.follow(print)


# The consumer, with a message and nothing around --------------------------------------------------


class Jobs:
    """Notes what is to start early."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start_early(self, job_id: str, fields: dict[str, Any], **_: Any) -> bool:
        self.started.append(job_id)
        return True


BODY = [[], {"prompt": "x"}, {}]


@pytest.mark.parametrize(
    ("headers", "body", "starts"),
    [
        ({}, BODY, True),
        ({"eta": "2030-01-01T00:00:00"}, BODY, False),
        ({"expires": "2030-01-01T00:00:00"}, BODY, False),
        ({"task": "another"}, BODY, False),
        ({"id": "revoked"}, BODY, False),
        ({}, [["x"], {}, {}], False),
        ({}, [[], {"prompt": "x" * MOST_EARLY_BYTES}, {}], False),
    ],
    ids=["plain", "eta", "expires", "another task", "revoked", "positional", "long"],
)
def test_what_celery_may_keep_back_or_is_long_does_not_start_early(
    claim: Claim,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    body: list[Any],
    starts: bool,
) -> None:
    monkeypatch.setattr(consumer, "revoked", {"revoked"})
    jobs = Jobs()
    mine = JobConsumer.__new__(JobConsumer)
    mine.app = SimpleNamespace(residency=SimpleNamespace(jobs=jobs))
    message = SimpleNamespace(
        headers={"task": TASK_NAME, "id": JOB} | headers, body=json.dumps(body), payload=body
    )
    assert mine._start_early(message) is starts
    assert jobs.started == [JOB] * starts


def test_no_job_starts_early_beside_another(claim: Claim) -> None:
    neighbour = replace(claim, job_id="neighbour")
    HELD_CLAIMS.add(neighbour)
    try:
        message = SimpleNamespace(
            headers={"task": TASK_NAME, "id": JOB}, body=json.dumps(BODY), payload=BODY
        )
        assert not JobConsumer.__new__(JobConsumer)._start_early(message)
    finally:
        HELD_CLAIMS.discard(neighbour)


# The runner, with an engine, a Redis and no Celery ------------------------------------------------


def test_a_job_that_started_early_runs_once(residency: Residency, claim: Claim) -> None:
    fields = {"prompt": "x", "max_tokens": TOKENS}
    assert residency.jobs.start_early(JOB, fields)
    result = residency.jobs.generate(JOB, (), fields)
    assert result.text == "w0 w1 w2 "
    assert residency.engine.stats().steps_total == TOKENS


def test_a_job_that_is_withdrawn_stops_and_leaves_nothing(
    residency: Residency, claim: Claim, redis_server: RedisServer, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "latch")
    with latch:
        assert residency.jobs.start_early(JOB, {"prompt": latch.prompt(after=1), "max_tokens": 9})
        wait_until(lambda: residency.engine.stats().steps_total, what="a first token")
        residency.jobs.withdraw(JOB)
        latch.wait_ended(1)
    with connect(redis_server.url) as store:
        assert not store.exists(keys.events(JOB))
    # It may come again, to the same worker under the same claim.
    assert residency.jobs.generate(JOB, (), {"prompt": "x", "max_tokens": 1}).text == "w0 "


def test_a_job_that_celery_forgets_before_it_entered_is_withdrawn(
    residency: Residency, claim: Claim, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "latch")
    with latch:
        residency.running.expect(JOB)
        assert residency.jobs.start_early(JOB, {"prompt": latch.prompt(after=1), "max_tokens": 9})
        residency.jobs.forget(JOB)
        latch.wait_ended(1)


def test_a_cancel_between_start_and_entry_is_kept(
    residency: Residency, claim: Claim, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "latch")
    fields = {"prompt": latch.prompt(after=1), "max_tokens": 9}
    with latch:
        assert residency.jobs.start_early(JOB, fields)
        residency.running.expect(JOB)
        residency.cancel(JOB)
        with pytest.raises(Cancelled):
            residency.jobs.generate(JOB, (), fields)


def test_a_refused_job_is_answered_by_its_thread(residency: Residency, claim: Claim) -> None:
    fields = {"prompt": "x", "max_tokens": -1}
    assert residency.jobs.start_early(JOB, fields)
    with pytest.raises(InvalidRequest):
        residency.jobs.generate(JOB, (), fields)


@pytest.mark.parametrize(
    "changes", [{"first": False}, {"cancelled": True}], ids=["claimed before", "cancelled"]
)
def test_a_claim_that_redis_must_be_asked_about_waits_for_its_thread(
    residency: Residency, claim: Claim, changes: dict[str, bool]
) -> None:
    HELD_CLAIMS.add(replace(claim, **changes))  # type: ignore[arg-type]
    try:
        assert not residency.jobs.start_early(JOB, {"prompt": "x"})
    finally:
        HELD_CLAIMS.add(claim)


@pytest.mark.parametrize(
    "fields", [{"prompt": "x", "idempotency_key": "k"}, {"messages": []}], ids=["key", "chat"]
)
def test_a_job_that_takes_long_to_submit_waits_for_its_thread(
    residency: Residency, claim: Claim, fields: dict[str, Any]
) -> None:
    assert not residency.jobs.start_early(JOB, fields)
    absent = {"prompt": "x", "idempotency_key": None, "messages": None}
    assert residency.jobs.start_early(JOB, absent)


def test_a_worker_that_leaves_hands_back_what_started_early(
    residency: Residency, claim: Claim, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "latch")
    fields = {"prompt": latch.prompt(after=1), "max_tokens": 9}
    with latch:
        assert residency.jobs.start_early(JOB, fields)
        residency.leave("tensors moved")
        residency.running.expect(JOB)
        with pytest.raises(HandedBack):
            residency.jobs.generate(JOB, (), fields)
        residency.jobs.forget(JOB)
        latch.wait_ended(1)


def test_no_job_starts_in_a_worker_that_leaves(residency: Residency, claim: Claim) -> None:
    residency.jobs.leave()
    assert not residency.jobs.start_early(JOB, {"prompt": "x"})


# A worker --------------------------------------------------------------------------------------


def test_the_engine_computes_before_celery_has_booked_the_job(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    app = "tests.worker.early_app"
    with (
        running_worker(redis_server.url, tmp_path, model_name="toy", app=app) as worker,
        Client(redis_server.url, model="toy") as client,
    ):
        job = client.submit(prompt="x", max_tokens=200)
        job.result(GET_S)
        assert f"the engine was first at {job.id}" in worker.text()
        events = [entry.event for entry in job.stream(timeout=GET_S)]
        assert [type(event) for event in (events[0], events[-1])] == [Started, Finished]


def test_what_celery_keeps_back_leaves_nothing_of_its_early_start(
    redis_server: RedisServer, stock: Celery, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "latch")
    with (
        latch,
        running_worker(redis_server.url, tmp_path, model_name="toy") as worker,
        Client(redis_server.url, model="toy") as client,
    ):
        # Celery looks for stamps only once the job is about to run.
        stock.control.revoke_by_stamped_headers({"batch": "7"}, reply=True)
        sent = stock.send_task(
            TASK_NAME,
            kwargs={"prompt": latch.prompt(after=1), "max_tokens": 9},
            queue="llorch.toy",
            batch="7",
            stamped_headers=["batch"],
        )
        latch.wait_ended(1)
        job = client.job(sent.id)
        with pytest.raises(Cancelled):
            job.result(GET_S)
        events = [entry.event for entry in job.stream(timeout=GET_S)]
        assert [type(event) for event in events] == [CancelledEvent]
        wait_until(lambda: not held_ids(client.redis), what="the message to be acknowledged")
        assert client.submit(prompt="x", max_tokens=3).result(GET_S).text == "w0 w1 w2 "
        assert worker.process.poll() is None
