"""Workers of one name with other models: no text is half of one and half of another."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.broker.fleet import registry
from llorch_worker.cli.checks import served_workers
from llorch_worker.cli.fleet_reading import Reading
from llorch_worker.cli.fleet_tables import notices
from llorch_worker.client import Client, Job
from llorch_worker.contract import ContextLengthExceeded, Restarted, Tokens
from llorch_worker.gateway.console.documents import Model
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, begun, running_worker, wait_until
from tests.store import record_of
from tests.telemetry.exporters import running_exporter
from tests.telemetry.scraping import scrape

GET_S = 60
TOKENS = 12
BEFORE = 5
"""Tokens that a job makes before its latch holds it."""

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def start(own_server: RedisServer, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts a worker of the model ``toy`` by its name and the word that its texts consist of. It
    leaves its jobs as soon as it is stopped."""
    with ExitStack() as running:

        def start(name: str, word: str = "w", **settings: object) -> WorkerProcess:
            given = {"model_name": "toy", "drain_s": 0, "TOY_STEP_MS": 5} | settings
            return running.enter_context(
                running_worker(own_server.url, tmp_path, name=name, TOY_FINGERPRINT=word, **given)
            )

        yield start


def text_of(word: str) -> str:
    return "".join(f"{word}{i} " for i in range(TOKENS))


def held(client: Client, latch: Latch) -> Job:
    """A job that has made some tokens and waits for the latch."""
    job = begun(client.submit(prompt=latch.prompt(BEFORE), max_tokens=TOKENS))
    # All of them are in the journal.
    wait_until(lambda: tokens_journalled(job) == BEFORE)
    return job


def tokens_journalled(job: Job) -> int:
    found = 0
    for entry in job.stream():
        if isinstance(entry.event, Tokens):
            found += len(entry.event.ids)
        if found == BEFORE:
            break
    return found


def test_a_job_whose_model_was_replaced_begins_again_and_says_so(
    own_client: Client, start: StartWorker, latch: Latch
) -> None:
    old = start("old", "a")
    job = held(own_client, latch)
    reader = job.stream(timeout=GET_S)
    seen = [next(reader).event for _ in range(2)]
    start("new", "b")
    old.stop()
    latch.open()
    result = job.result(GET_S)
    assert (result.text, result.model_fingerprint, result.attempts) == (text_of("b"), "b", 1)
    seen += [entry.event for entry in reader]
    again = next(at for at, event in enumerate(seen) if isinstance(event, Restarted))
    texts = [
        "".join(event.text for event in events if isinstance(event, Tokens))
        for events in (seen[:again], seen[again:])
    ]
    assert text_of("a").startswith(texts[0])
    assert texts[1] == result.text
    # Who comes later reads only the whole text.
    late = [entry.event for entry in job.stream(timeout=GET_S)]
    assert isinstance(late[0], Restarted)
    assert "".join(event.text for event in late if isinstance(event, Tokens)) == result.text


def test_a_job_waits_for_a_worker_of_its_own_model_while_one_lives(
    own_client: Client, start: StartWorker, latch: Latch
) -> None:
    first, second = start("first", "a"), start("second", "a", max_sequences=1)
    # It has no room, and lives.
    with second.paused():
        job = held(own_client, latch)
        other = start("other", "b")
        first.stop()
        wait_until(lambda: record_of(own_client.redis, job.id).get("needs_fingerprint") == "a")
        claimed = record_of(own_client.redis, job.id).get("fence")
        wait_until(lambda: "of another model" in other.text())
    latch.open()
    result = job.result(GET_S)
    assert (result.text, result.model_fingerprint, result.worker, result.attempts) == (
        text_of("a"), "a", second.hostname, 1
    )  # fmt: skip
    # Nobody claimed it in between.
    history = record_of(own_client.redis, job.id).get("history")
    assert history.count("\n") == 3, history
    assert int(record_of(own_client.redis, job.id).get("fence")) > int(claimed)
    assert not any(isinstance(entry.event, Restarted) for entry in job.stream(timeout=GET_S))


def test_two_models_under_one_name_are_reported(
    own_client: Client, own_server: RedisServer, start: StartWorker, tmp_path: Path
) -> None:
    start("first", "a")
    with running_exporter(own_server.url, tmp_path) as exporter:
        assert scrape(exporter)("llorch_fleet_models", model_name="toy") == 1
        second = start("second", "b")
        told = "first@test serves another model as toy than this worker (a, here b)"
        wait_until(lambda: told in second.text())
        wait_until(lambda: scrape(exporter)("llorch_fleet_models", model_name="toy") == 2)
    sentence = "2 different models are served as toy: a (1 worker), b (1 worker)"
    with FleetClient(own_server.url) as fleet:
        found = fleet.fleet()
    assert any(sentence in notice.plain for notice in notices(Reading(found, 0)))
    checks = served_workers(own_server.url, ())
    assert sentence in [check.finding for check in checks if check.verdict == "warn"]
    assert Model.of(found.models[0]).fingerprints == {"a": 1, "b": 1}


def test_another_arithmetic_on_the_same_model_goes_on_and_the_result_names_both(
    own_client: Client, start: StartWorker, latch: Latch
) -> None:
    old = start("old", TOY_ARITHMETIC="bfloat16")
    job = held(own_client, latch)
    start("new", TOY_ARITHMETIC="float32")
    old.stop()
    latch.open()
    result = job.result(GET_S)
    assert (result.text, result.arithmetic) == (text_of("w"), ("bfloat16", "float32"))


def test_a_job_that_one_context_does_not_hold_goes_to_a_worker_with_a_larger_one(
    own_client: Client, start: StartWorker
) -> None:
    large, _small = start("large", max_context=100), start("small", max_context=20)
    for job in [own_client.submit(prompt="x", max_tokens=50) for _ in range(12)]:
        result = job.result(GET_S)
        assert (result.worker, result.attempts) == (large.hostname, 1)
    with pytest.raises(ContextLengthExceeded):
        own_client.submit(prompt="x " * 60, max_tokens=50).result(GET_S)


def test_a_job_for_a_larger_context_waits_while_only_a_smaller_worker_lives(
    own_client: Client, start: StartWorker
) -> None:
    large, small = start("large", max_context=100), start("small", max_context=20)
    large.stop()
    jobs = [
        own_client.submit(prompt="x", max_tokens=50),
        own_client.submit(prompt_token_ids=[1] * 40, max_tokens=10),
    ]
    assert own_client.submit(prompt="x", max_tokens=5).result(GET_S).worker == small.hostname
    wait_until(lambda: record_of(own_client.redis, jobs[0].id).get("least_context") == "21")
    assert {job.status().state for job in jobs} == {"queued"}
    again = start("again", max_context=100)
    assert {job.result(GET_S).worker for job in jobs} == {again.hostname}
    assert {job.result(0).attempts for job in jobs} == {1}


def test_a_job_that_exceeds_every_worker_of_the_last_minutes_fails(
    own_client: Client, start: StartWorker
) -> None:
    large, _small = start("large", max_context=100), start("small", max_context=20)
    large.stop()
    asked: list[dict[str, Any]] = [{"prompt": "x"}, {"prompt_token_ids": [1] * 40}]
    jobs = [own_client.submit(**each, max_tokens=50) for each in asked]
    wait_until(lambda: record_of(own_client.redis, jobs[0].id).get("least_context") == "21")
    own_client.redis.zincrby(keys.contexts("toy"), -1e3 * registry.AWAITED_S, "100")
    jobs.append(own_client.submit(**asked[0], max_tokens=50))
    for job in jobs:
        with pytest.raises(ContextLengthExceeded):
            job.result(GET_S)


def test_a_job_that_was_handed_to_a_worker_that_stops_goes_to_another(
    own_client: Client, start: StartWorker, latch: Latch
) -> None:
    first, second = start("first", "a"), start("second", "a")
    second.process.send_signal(signal.SIGSTOP)
    job = held(own_client, latch)
    start("other", "b")
    first.stop()
    wait_until(lambda: record_of(own_client.redis, job.id).get("needs_fingerprint") == "a")
    second.process.send_signal(signal.SIGKILL)
    latch.open()
    assert job.result(GET_S).text == text_of("b")
