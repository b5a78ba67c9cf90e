"""A worker of several models keeps the one that its jobs ask for.

The tests with workers of their own come first: the shared one would take their jobs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.client import Client
from llorch_worker.contract import Failed, InvalidRequest, ModelLoadFailed
from tests.cli.command import run
from tests.latch import Latch
from tests.services import (
    RedisServer,
    WorkerProcess,
    begun,
    free_port,
    own_redis,
    running_worker,
    token_ids,
    wait_until,
)
from tests.telemetry.scraping import scrape
from tests.toy_generation import token_id

MODELS = "a.gguf,b.gguf,c.gguf"


@contextmanager
def running(redis_server: RedisServer, folder: Path, **settings: Any) -> Iterator[WorkerProcess]:
    usual = {"models": MODELS, "min_resident_s": 0, "max_wait_s": 600}
    with running_worker(redis_server.url, folder, **(usual | settings)) as worker:
        yield worker


def loads(worker: WorkerProcess) -> list[str]:
    """The models that it has loaded, in order."""
    marks = (" is resident on ", " is resident after ")
    return [
        line.partition(mark)[0].split()[-1]
        for line in worker.text().splitlines()
        for mark in marks
        if mark in line
    ]


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Client]:
    with Client(redis_server.url) as client:
        yield client


def test_a_job_that_runs_too_long_goes_back_and_resumes_when_its_model_returns(
    redis_server: RedisServer, client: Client, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "latch")
    with latch, running(redis_server, tmp_path, name="w2", max_wait_s=1.5) as worker:
        long = begun(client.submit(model="a", prompt=latch.prompt(after=2), max_tokens=5))
        short = client.submit(model="b", prompt="x", max_tokens=3)
        assert short.result(timeout=120).model == "b"
        latch.open()
        result = long.result(timeout=120)
        assert result.text == "w0 w1 w2 w3 w4 "
        assert token_ids(long.stream()) == [token_id(result.seed, place) for place in range(5)]
        assert result.resumed
        assert result.attempts == 1, "what the worker gives back is no attempt"
        wait_until(lambda: loads(worker)[:3] == ["a", "b", "a"])


def test_a_model_that_does_not_load_is_set_aside_and_other_models_and_workers_go_on(
    redis_server: RedisServer, client: Client, tmp_path: Path
) -> None:
    refused = tmp_path / "refused"
    refused.write_text("a")
    with running(redis_server, tmp_path, name="w3", TOY_REFUSES=refused) as worker:
        assert loads(worker) == ["b"]
        waits = client.submit(model="a", prompt="x", max_tokens=3)
        wait_until(lambda: "a is set aside for 30 s" in worker.text())
        assert "a is damaged" in worker.text()
        assert client.submit(model="c", prompt="x", max_tokens=3).result(timeout=120).model == "c"
        assert not waits.status().ended
        with running(redis_server, tmp_path, name="w4", pin="a") as pinned:
            assert waits.result(timeout=120).model == "a"
            assert client.submit(model="b", prompt="x", max_tokens=3).result(120).model == "b"
            assert loads(pinned) == ["a"]
            with FleetClient(redis_server.url) as fleet:
                # A card moves to the new model a moment after the change.
                wait_until(
                    lambda: (
                        {load.model: (load.workers, load.slots) for load in fleet.fleet().models}
                        == {"a": (2, 16), "b": (2, 16), "c": (2, 0)}
                    )
                )


def test_jobs_of_a_model_that_no_worker_can_load_fail_with_the_reason(tmp_path: Path) -> None:
    refused = tmp_path / "refused"
    refused.write_text("a")
    options = {"app": "tests.worker.impatient_app", "TOY_REFUSES": refused}
    with (
        own_redis() as server,
        Client(server.url) as client,
        running(server, tmp_path, name="w6", **options) as worker,
    ):
        waits = client.submit(model="a", prompt="x", max_tokens=3)
        with pytest.raises(ModelLoadFailed, match="no worker can load a: a is damaged") as failed:
            waits.result(timeout=120)
        assert failed.value.retriable
        assert worker.text().count("a is set aside") >= 3, "it was tried again"
        [*_, last] = [entry.event for entry in waits.stream(timeout=60)]
        assert isinstance(last, Failed)
        assert last.error.code == "MODEL_LOAD_FAILED"
        wait_until(lambda: worker.text().count("1 job of a failed") == 1)
        refused.unlink()

        def serves() -> bool:
            """Jobs that come before the next try end at once."""
            with suppress(ModelLoadFailed):
                return (
                    client.submit(model="a", prompt="x", max_tokens=3).result(timeout=120).model
                    == "a"
                )
            return False

        wait_until(serves)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, a load of the shared worker takes long."""
    return tmp_path_factory.mktemp("slow") / "slow"


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that do not load in the shared worker."""
    return tmp_path_factory.mktemp("refused") / "refused"


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, slow: Path, refused: Path
) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("worker")
    with running(
        redis_server,
        folder,
        TOY_LOADS_SLOWLY_FROM=slow,
        TOY_REFUSES=refused,
        metrics_port=free_port(),
    ) as worker:
        yield worker


def test_single_jobs_of_three_models_in_turn_cost_two_changes(
    worker: WorkerProcess, client: Client
) -> None:
    assert loads(worker) == ["a"]
    with worker.paused():
        jobs = [client.submit(model=name, prompt="x", max_tokens=3) for name in "abcabc"]
    for job, name in zip(jobs, "abcabc", strict=True):
        assert job.result(timeout=120).model == name
    wait_until(lambda: loads(worker) == ["a", "b", "c"])
    card = worker.card()
    assert card is not None
    found = scrape(str(card.metrics_address))
    assert found("llorch_model_loads_total", model_name="b", reason="idle") == 1
    assert [found("llorch_resident", model_name=name) for name in "abc"] == [0, 0, 1]


def test_a_job_says_which_model_it_is_for_although_one_alone_is_loaded(
    worker: WorkerProcess, client: Client
) -> None:
    card = worker.card()
    assert card is not None
    assert card.models == ("a", "b", "c")
    with pytest.raises(InvalidRequest, match="must be one of a, b, c"):
        client.submit(prompt="x", max_tokens=3)


def test_an_engine_that_dies_while_it_loads_for_a_change_costs_no_job(
    worker: WorkerProcess, client: Client, slow: Path
) -> None:
    assert client.submit(model="a", prompt="x", max_tokens=3).result(timeout=120).model == "a"
    before = worker.engine_pid()
    slow.touch()
    job = client.submit(model="b", prompt="x", max_tokens=3)
    pid = wait_until(lambda: (found := worker.find_engine()) != before and found)
    slow.unlink()
    assert not psutil.pid_exists(before), "the next one is loaded once it has ended"
    os.kill(int(pid), signal.SIGKILL)
    result = job.result(timeout=120)
    assert (result.model, result.attempts) == ("b", 1)


def test_a_person_loads_and_unloads_a_model(
    worker: WorkerProcess, client: Client, redis_server: RedisServer
) -> None:
    def tell(*command: str) -> str:
        return run(*command, LLORCH_REDIS_URL=redis_server.url).out

    assert client.submit(model="b", prompt="x", max_tokens=3).result(timeout=120).model == "b"
    assert tell("load", "c") == f"{worker.hostname} loads c\n"
    wait_until(lambda: (card := worker.card()) is not None and card.model == "c")
    wait_until(lambda: "to c: somebody asked for it" in worker.text())
    assert tell("unload", "c") == f"{worker.hostname} unloads c\n"
    wait_until(lambda: worker.find_engine() is None)
    assert client.submit(model="c", prompt="x", max_tokens=3).result(timeout=120).model == "c"
    refused = run("load", "d", LLORCH_REDIS_URL=redis_server.url)
    assert refused.code == 1
    assert "no worker serves 'd'; see llorch status" in refused.err


def test_an_engine_without_jobs_ends_and_the_next_job_brings_it_back(
    tmp_path: Path,
) -> None:
    with (
        own_redis() as server,
        running_worker(
            server.url, tmp_path, name="w5", model_name="toy", idle_unload_s=0.5
        ) as worker,
        Client(server.url) as client,
    ):
        wait_until(lambda: worker.find_engine() is None)
        wait_until(lambda: (card := worker.card()) is not None and card.away)
        assert client.submit(prompt="x", max_tokens=3).result(timeout=120).model == "toy"
        assert "loads toy: its jobs wait" in worker.text()


def test_a_model_that_does_not_load_after_a_death_makes_way_for_others(
    worker: WorkerProcess, client: Client, refused: Path
) -> None:
    assert client.submit(model="b", prompt="x", max_tokens=3).result(timeout=120).model == "b"
    before = worker.text().count("b is set aside")
    refused.write_text("b")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    wait_until(lambda: worker.text().count("b is set aside") > before)
    assert client.submit(model="c", prompt="x", max_tokens=3).result(timeout=120).model == "c"
