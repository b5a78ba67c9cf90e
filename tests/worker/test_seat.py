"""A worker that keeps two models at a time has a seat for each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.client import Client
from tests.latch import Latch
from tests.services import WorkerProcess, begun, free_port, own_redis, running_worker, wait_until
from tests.telemetry.scraping import scrape

TOKENS = 4


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """It keeps two of three models, and no job waits so long that another must go for it."""
    with (
        own_redis() as server,
        running_worker(
            server.url,
            tmp_path_factory.mktemp("worker"),
            models="a.gguf,b.gguf,c.gguf",
            resident=2,
            tenant_weights="acme=3",
            min_resident_s=0,
            max_wait_s=3_600,
            metrics_port=free_port(),
            max_sequences=4,
        ) as worker,
    ):
        yield worker


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    with Client(worker.redis_url) as client:
        yield client


def cards(client: Client) -> dict[str, WorkerCard]:
    """By the model that is loaded there."""
    return {card.model: card for card in registry.workers(client.redis) if not card.away}


def test_tenants_have_their_weights_also_where_a_model_is_not_loaded(
    worker: WorkerProcess, client: Client
) -> None:
    """A worker announces such models last."""
    wait_until(lambda: {*registry.models(client.redis)} == {"a", "b", "c"})
    weights = {name: card.tenant_weights for name, card in registry.models(client.redis).items()}
    assert weights == dict.fromkeys("abc", "acme=3")


def test_the_death_of_one_engine_leaves_the_jobs_of_the_other_alone(
    worker: WorkerProcess, client: Client, tmp_path: Path
) -> None:
    wait_until(lambda: {*cards(client)} == {"a", "b"})
    with ExitStack() as stack:
        latches = {model: stack.enter_context(Latch(tmp_path / f"latch-{model}")) for model in "ab"}
        jobs = [
            (
                model,
                client.submit(model=model, prompt=latches[model].prompt(), max_tokens=TOKENS),
            )
            for _ in range(3)
            for model in "ab"
        ]
        for _, job in jobs:
            begun(job)
        wait_until(lambda: [cards(client)[model].running for model in "ab"] == [3, 3])
        pid = cards(client)["a"].engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: (card := cards(client).get("a")) and card.engine["deaths"] == 1)
        for latch in latches.values():
            latch.open()
        results = [(model, job.result(timeout=120)) for model, job in jobs]
    assert [bool(result.resumed) for model, result in results if model == "a"] == [True] * 3
    assert not any(result.resumed for model, result in results if model == "b")
    assert cards(client)["b"].engine["deaths"] == 0
    os.kill(cards(client)["b"].engine_pid or 0, signal.SIGKILL)
    for model in "ba":
        assert client.submit(model=model, prompt="x", max_tokens=TOKENS).result(120).model == model


def test_a_seat_changes_its_model_while_the_other_goes_on(
    worker: WorkerProcess, client: Client, tmp_path: Path
) -> None:
    wait_until(lambda: {*cards(client)} == {"a", "b"})
    with Latch(tmp_path / "latch") as latch:
        stays = begun(client.submit(model="b", prompt=latch.prompt(), max_tokens=TOKENS))
        assert client.submit(model="c", prompt="x", max_tokens=TOKENS).result(120).model == "c"
        wait_until(lambda: {*cards(client)} == {"b", "c"})
        # A card tells what ran a moment ago.
        wait_until(lambda: cards(client)["b"].running == 1)
        latch.open()
        result = stays.result(timeout=120)
    assert not result.resumed
    found = scrape(str(cards(client)["b"].metrics_address))
    assert [found("llorch_resident", model_name=name) for name in "abc"] == [0, 1, 1]
    assert found("llorch_job_attempts_total", model_name="b") >= 1
    assert found("llorch_model_loads_total", model_name="c", reason="idle") == 1
    with FleetClient(worker.redis_url) as fleet:
        wait_until(
            lambda: (
                {load.model: (load.workers, load.slots) for load in fleet.fleet().models}
                == {"a": (1, 0), "b": (1, 4), "c": (1, 4)}
            )
        )
        assert fleet.fleet().worker_count == 1
