"""A worker gets the new weights that its model's files hold, and no job is half of each."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llorch_worker.client import Client, Job
from llorch_worker.contract import GenerationResult, Restarted
from llorch_worker.demo_model import STORY_MODEL
from tests.cli.command import run
from tests.latch import Latch
from tests.services import (
    REAL_APP,
    RedisServer,
    WorkerProcess,
    begun,
    free_port,
    running_worker,
    wait_until,
)
from tests.telemetry.scraping import scrape
from tests.zygote import is_process_of

GET_S = 120
TOKENS = 6
BEFORE = 3
"""Tokens that a job makes before its latch holds it."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``weights``: the word that texts consist of. ``fails``: how a load fails; ``slow``: while it
    exists, a load takes long."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "weights").write_text("a")
    return folder


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    with running_worker(
        redis_server.url,
        tmp_path_factory.mktemp("worker"),
        model_name="toy",
        TOY_FINGERPRINT_FILE=files / "weights",
        TOY_FAILS_FROM=files / "fails",
        TOY_LOADS_SLOWLY_FROM=files / "slow",
        metrics_port=free_port(),
    ) as worker:
        yield worker


def text_of(word: str) -> str:
    return "".join(f"{word}{i} " for i in range(TOKENS))


def made_of(word: str, result: GenerationResult) -> None:
    assert (result.text, result.model_fingerprint) == (text_of(word), word)


def ask(worker: WorkerProcess, url: str) -> None:
    told = run("reload", "toy", LLORCH_REDIS_URL=url)
    assert told.out == f"{worker.hostname} reloads toy\n", told.err


def reload_of(worker: WorkerProcess) -> str:
    """What the worker's card says of its reload."""
    card = worker.card()
    return (card and card.reload) or ""


def fingerprint_of(worker: WorkerProcess) -> str:
    card = worker.card()
    return card.fingerprint if card else ""


def loads_of(worker: WorkerProcess) -> dict[str, float]:
    """How many its metrics count, by their reason."""
    card = worker.card()
    assert card is not None
    samples = scrape(str(card.metrics_address)).samples.items()
    return {
        dict(labels)["reason"]: value
        for (name, labels), value in samples
        if name == "llorch_model_loads_total" and value
    }


def intakes_of(worker: WorkerProcess) -> set[int]:
    """The processes of its intakes."""
    children = psutil.Process(worker.process.pid).children(recursive=True)
    module = "llorch_worker.intake.serving"
    return {each.pid for each in children if is_process_of(module, Path(f"/proc/{each.pid}"))}


def new_job(client: Client) -> GenerationResult:
    return client.submit(model="toy", prompt="x", max_tokens=TOKENS).result(GET_S)


def restarts(job: Job) -> int:
    events = (entry.event for entry in job.stream(timeout=GET_S))
    return sum(isinstance(event, Restarted) for event in events)


def test_weights_that_do_not_load_leave_the_old_ones_with_the_reason(
    worker: WorkerProcess, client: Client, redis_server: RedisServer, files: Path
) -> None:
    (files / "fails").write_text("the file is damaged")
    try:
        ask(worker, redis_server.url)
        wait_until(lambda: "keeps the old weights of toy: the file is dam" in reload_of(worker))
        made_of("a", new_job(client))
        assert "the file is damaged" in run("status", LLORCH_REDIS_URL=redis_server.url).out
    finally:
        (files / "fails").unlink()


def test_the_same_weights_are_not_loaded_again(worker: WorkerProcess, client: Client) -> None:
    pid, before = worker.engine_pid(), worker.text().count("toy has these weights already")
    os.kill(worker.process.pid, signal.SIGHUP)
    wait_until(lambda: worker.text().count("toy has these weights already") > before)
    wait_until(lambda: not reload_of(worker))
    assert worker.engine_pid() == pid
    made_of("a", new_job(client))


def test_an_engine_that_dies_while_it_loads_new_weights_leaves_the_old_one(
    worker: WorkerProcess, client: Client, files: Path
) -> None:
    old = worker.engine_pid()
    (files / "slow").touch()
    os.kill(worker.process.pid, signal.SIGHUP)

    [pid] = wait_until(lambda: {*worker.engines()} - {old})
    wait_until(lambda: (card := worker.card()) is not None and "toy" in card.loading)
    (files / "slow").unlink()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "keeps the old weights of toy: signal SIGKILL" in reload_of(worker))
    assert worker.engine_pid() == old
    made_of("a", new_job(client))


def test_new_jobs_get_the_new_weights_while_old_ones_end_on_the_old(
    worker: WorkerProcess, client: Client, redis_server: RedisServer, files: Path, latch: Latch
) -> None:
    old = worker.engine_pid()
    jobs = [begun(client.submit(prompt=latch.prompt(BEFORE), max_tokens=TOKENS)) for _ in range(3)]
    (files / "weights").write_text("b")
    ask(worker, redis_server.url)
    wait_until(lambda: fingerprint_of(worker) == "b")
    made_of("b", new_job(client))
    assert psutil.pid_exists(old)
    latch.open()
    for job in jobs:
        made_of("a", job.result(GET_S))
        assert not restarts(job)
    wait_until(lambda: not psutil.pid_exists(old))
    assert not reload_of(worker)
    assert loads_of(worker) == {"first": 1, "reload": 1}
    # What dies now is replaced by the same.
    os.kill(worker.engine_pid(), signal.SIGKILL)
    made_of("b", new_job(client))
    assert loads_of(worker) == {"first": 1, "reload": 1, "death": 1}


def test_an_old_engine_that_dies_hands_its_jobs_to_the_new_one_which_begins_them_again(
    worker: WorkerProcess, client: Client, files: Path, latch: Latch
) -> None:
    old = worker.engine_pid()
    job = begun(client.submit(prompt=latch.prompt(BEFORE), max_tokens=TOKENS))
    (files / "weights").write_text("c")
    os.kill(worker.process.pid, signal.SIGHUP)
    wait_until(lambda: fingerprint_of(worker) == "c")
    os.kill(old, signal.SIGKILL)
    latch.open()
    made_of("c", job.result(GET_S))
    assert restarts(job) == 1
    wait_until(lambda: len([*worker.engines()]) == 1)


@pytest.mark.parametrize(
    "bound",
    [
        {"model_name": "toy", "drain_s": 1},
        {"models": "toy.gguf,waits.gguf", "max_wait_s": 1},
    ],
)
def test_where_memory_holds_one_engine_the_next_is_loaded_once_the_jobs_have_left(
    own_server: RedisServer,
    own_client: Client,
    tmp_path: Path,
    latch: Latch,
    bound: dict[str, Any],
) -> None:
    """Jobs of other models do not wait longer for it than they may."""
    weights = tmp_path / "weights"
    weights.write_text("a")
    with running_worker(
        own_server.url,
        tmp_path,
        app="tests.worker.scarce_app",
        TOY_FINGERPRINT_FILE=weights,
        **bound,
    ) as worker:
        old = worker.engine_pid()
        made_of("a", new_job(own_client))
        job = begun(own_client.submit(model="toy", prompt=latch.prompt(BEFORE), max_tokens=TOKENS))
        weights.write_text("b")
        ask(worker, own_server.url)
        # It runs longer than it may, and goes back.
        wait_until(lambda: fingerprint_of(worker) == "b")
        assert not psutil.pid_exists(old)
        latch.open()
        made_of("b", job.result(GET_S))
        assert restarts(job) == 1
        assert run("reload", "other", LLORCH_REDIS_URL=own_server.url).code == 1
        told = run("reload", "toy", "--json", LLORCH_REDIS_URL=own_server.url)
        assert told.json == {"workers": [worker.hostname], "model": "toy", "does": "reloads"}


def test_a_models_file_is_compared_and_looked_through_before_anything_is_loaded(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    file, new = tmp_path / "model.gguf", tmp_path / "new"
    weights = bytearray(STORY_MODEL.read_bytes())
    weights[-64] ^= 1
    shutil.copy(STORY_MODEL, file)
    with running_worker(
        own_server.url, tmp_path, app=REAL_APP, model=file, model_name="toy"
    ) as worker:
        old = worker.engine_pid()
        before = own_client.submit(prompt="Once", max_tokens=4, temperature=0).result(GET_S)
        os.kill(worker.process.pid, signal.SIGHUP)
        wait_until(lambda: "toy has these weights already" in worker.text())
        new.write_bytes(STORY_MODEL.read_bytes()[:100_000])
        new.replace(file)
        os.kill(worker.process.pid, signal.SIGHUP)
        wait_until(lambda: "keeps the old weights of toy" in reload_of(worker))
        assert worker.engine_pid() == old
        new.write_bytes(weights)
        new.replace(file)
        os.kill(worker.process.pid, signal.SIGHUP)
        wait_until(lambda: fingerprint_of(worker) not in ("", before.model_fingerprint))
        after = own_client.submit(prompt="Once", max_tokens=4, temperature=0).result(GET_S)
        assert after.model_fingerprint == fingerprint_of(worker)
        assert own_client.submit(prompt="Once", max_tokens=1).result(GET_S).usage.prompt
        # One that dies is followed by one that reads what is there, as its intake does.
        intakes = intakes_of(worker)
        shutil.copy(STORY_MODEL, new)
        new.replace(file)
        os.kill(worker.engine_pid(), signal.SIGKILL)
        wait_until(lambda: fingerprint_of(worker) == before.model_fingerprint)
        assert intakes
        assert not intakes & intakes_of(worker)
        again = own_client.submit(prompt="Once", max_tokens=4, temperature=0).result(GET_S)
        assert (again.text, again.model_fingerprint) == (before.text, before.model_fingerprint)
