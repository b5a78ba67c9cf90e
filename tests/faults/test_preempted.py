"""A preempted job, which waits in its worker's engine, and the faults that can befall it there."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.client import Client, Job
from llorch_worker.contract import Cancelled, GenerationRequest
from llorch_worker.contract.result import Choice
from llorch_worker.engine import Engine
from tests.services import RedisServer, WorkerProcess, begun, stock_app, token_ids, wait_until
from tests.store import held_ids

GET_S = 90
STEP_MS = 20
FIELDS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LOW: dict[str, Any] = FIELDS | {"prompt": "Once upon a time", "max_tokens": 90}
HIGH: dict[str, Any] = FIELDS | {"prompt": "The little dog", "max_tokens": 50}

Start = Callable[..., WorkerProcess]


@pytest.fixture(scope="module")
def answers(trained_model: Path) -> list[Choice]:
    """Of the low and the high job, each alone."""
    engine = Engine.load(trained_model / "f32.gguf", device="cpu", dtype="float32")
    try:
        results = [engine.submit(GenerationRequest(**job)).result(GET_S) for job in (LOW, HIGH)]
    finally:
        engine.close()
    return [result.choices[0] for result in results]


@pytest.fixture(scope="module")
def expected(answers: list[Choice]) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


@pytest.fixture
def start(own_server: RedisServer, tmp_path: Path, trained_model: Path) -> Iterator[Start]:
    """Starts workers for one job at a time."""
    with ExitStack() as stack:

        def start(name: str, **settings: Any) -> WorkerProcess:
            worker = WorkerProcess(
                own_server.url, tmp_path / f"{name}.log", app="tests.faults.slow_app", name=name,
                model=trained_model / "f32.gguf", model_name="stories", dtype="float32",
                max_sequences=1, lease_s=3, sweep_s=1, **{"SLOW_STEP_MS": STEP_MS} | settings,
            )  # fmt: skip
            stack.callback(worker.stop)
            return worker.wait_ready()

        yield start


def preempted(client: Client) -> list[Job]:
    """A low job, and the high one that has taken its place."""
    low = begun(client.submit(**LOW, priority="low"))
    return [low, begun(client.submit(**HIGH, priority="high"))]


def assert_whole(client: Client, jobs: list[Job], expected: list[list[int]]) -> None:
    for job, ids in zip(jobs, expected, strict=True):
        assert list(job.result(GET_S).choices[0].token_ids) == ids
        assert token_ids(job.stream(timeout=GET_S)) == ids
    wait_until(lambda: not held_ids(client.redis))


def test_it_goes_on_when_redis_dies_and_returns(
    own_server: RedisServer, own_client: Client, start: Start, expected: list[list[int]]
) -> None:
    worker = start("w1")
    jobs = preempted(own_client)
    own_server.kill()
    wait_until(lambda: "Connection to broker lost" in worker.text())
    own_server.start()
    assert_whole(own_client, jobs, expected)


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)], ids=["drained", "killed"]
)
def test_it_goes_on_in_another_worker(
    own_client: Client, start: Start, expected: list[list[int]], how: signal.Signals, code: int
) -> None:
    worker = start("w1", drain_s=0.3)
    jobs = preempted(own_client)
    worker.process.send_signal(how)
    assert worker.wait_exit(GET_S) == code
    assert not any(job.status().ended for job in jobs)
    start("w2")
    assert_whole(own_client, jobs, expected)


def test_a_revoke_ends_it_while_the_high_job_still_runs(
    own_server: RedisServer, own_client: Client, start: Start, expected: list[list[int]]
) -> None:
    start("w1")
    low, high = preempted(own_client)
    with stock_app(own_server.url) as stock:
        stock.control.revoke(low.id, terminate=True, signal="SIGKILL")
    with pytest.raises(Cancelled):
        low.result(GET_S)
    assert not high.status().ended
    assert_whole(own_client, [high], expected[1:])


def test_a_job_whose_tokens_are_guessed_goes_on_in_another_worker(
    own_client: Client, start: Start, answers: list[Choice], expected: list[list[int]]
) -> None:
    settings = {"drafter": "lookup", "SLOW_STEP_MS": 150}
    worker = start("w1", **settings)
    job = own_client.submit(**LOW, prediction=answers[0].text)
    next(entry for entry in job.stream(timeout=GET_S) if entry.event.type == "tokens")
    worker.process.kill()
    worker.wait_exit(GET_S)
    start("w2", **settings)
    assert_whole(own_client, [job], expected[:1])
    result = job.result(GET_S)
    assert result.attempts == 2
    assert result.usage.accepted_draft_tokens > 0
