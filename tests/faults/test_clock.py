"""A worker whose clock is ten minutes off takes no job early and keeps its deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.client import Client
from llorch_worker.contract import Started
from tests.faults.conftest import LEASE_S, SWEEP_S, StartWorker
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import QUICK_START, RedisServer, wait_until

TEN_MINUTES_S = 600
OFFSETS_S = [TEN_MINUTES_S, -TEN_MINUTES_S]
SKEWED: Any = {"app": "tests.faults.skewed_app", "options": QUICK_START, "fresh": True}
"""Fresh, because what is imported before may keep the right clock."""
GET_S = 60


@pytest.mark.parametrize("offset_s", OFFSETS_S)
def test_a_job_is_redelivered_only_when_its_worker_dies(
    witness: Witness,
    start_worker: StartWorker,
    make_latch: Callable[[str], Latch],
    offset_s: int,
) -> None:
    all_there, dead = make_latch("all-there"), make_latch("dead")
    start_worker("right", TOY_STEP_MS=10)
    # At 10 ms a token, each job outlasts a lease and a sweep.
    tokens = round(1.5 * (LEASE_S + SWEEP_S) * 100)
    first = [witness.begun(witness.send(tokens, all_there.prompt())) for _ in range(2)]
    wrong = start_worker("wrong", **SKEWED, TOY_STEP_MS=10, CLOCK_OFFSET_S=offset_s)
    card = wait_until(wrong.card)
    assert abs(card.started_at - time.time() - offset_s) < TEN_MINUTES_S / 2, "its clock is wrong"
    # As many as both run together, so each has some.
    second = [witness.begun(witness.send(tokens, all_there.prompt())) for _ in range(6)]
    all_there.open()
    witness.assert_whole(*first, *second, timeout_s=GET_S)
    runs = [witness.runs(job) for job in (*first, *second)]
    assert {len(run) for run in runs} == {1}, "each ran once"
    assert {run[0] for run in runs} == {"right@test", "wrong@test"}
    # The jobs of the wrong worker are redelivered when it dies.
    last = [witness.begun(witness.send(150, dead.prompt(after=149))) for _ in range(8)]
    wrong.process.kill()
    wrong.process.wait()
    dead.open()
    witness.assert_whole(*last, timeout_s=GET_S)
    assert max(job.result(0).attempts for job in last) == 2


@pytest.mark.parametrize("offset_s", OFFSETS_S)
def test_deadlines_and_queue_times_are_right(
    own_server: RedisServer, start_worker: StartWorker, demo_model: Path, offset_s: int
) -> None:
    with Client(own_server.url, model="demo") as client:
        start_worker(model=demo_model, model_name="demo", **SKEWED, CLOCK_OFFSET_S=offset_s)
        long = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True}
        result = client.submit(**long, deadline_s=TEN_MINUTES_S / 2).result(GET_S)
        assert result.choices[0].finish_reason == "length"
        assert 0 <= result.timings.queue_ms < TEN_MINUTES_S * 1e3 / 2
        started = next(client.submit(**long).stream(timeout=GET_S)).event
        assert isinstance(started, Started)
        assert started.queue_ms < TEN_MINUTES_S * 1e3 / 2
        # A job that waited past its deadline ends at once.
        late = client.submit(**long, deadline_s=0.001)
        assert late.result(GET_S).choices[0].finish_reason == "deadline"
