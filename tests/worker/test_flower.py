"""Flower beside a real worker: what its pages show and what its Terminate button does."""

from __future__ import annotations

import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from llorch_worker.client import Client
from llorch_worker.contract import Cancelled
from tests.services import (
    REPOSITORY,
    START_TIMEOUT_S,
    TOY_APP,
    RedisServer,
    WorkerProcess,
    begun,
    environment,
    free_port,
    tethered,
    wait_until,
)

pytest.importorskip("flower", reason="needs the flower extra")

GET_S = 30


class Flower:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def post(self, path: str, **fields: str) -> str:
        data = urllib.parse.urlencode(fields).encode()
        with urllib.request.urlopen(self.url + path, data=data, timeout=10) as answer:
            return str(answer.read().decode())

    def task(self, job_id: str) -> str:
        """What Flower knows of a task; nothing before its first event came."""
        try:
            return self.get(f"/api/task/info/{job_id}")
        except HTTPError:
            return ""

    def answers(self) -> bool:
        try:
            return bool(self.get("/healthcheck"))
        except OSError:
            return False


@pytest.fixture(scope="module")
def flower(
    redis_server: RedisServer, toy_worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flower]:
    port = free_port()
    log: Path = tmp_path_factory.mktemp("flower") / "flower.log"
    command = tethered(
        sys.executable, "-m", "celery", "-A", TOY_APP, "flower",
        "--address=127.0.0.1", f"--port={port}",
    )  # fmt: skip
    settings = environment(redis_server.url, model_name="toy", FLOWER_UNAUTHENTICATED_API="true")
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=settings, stdout=sink, stderr=subprocess.STDOUT
        )
    found = Flower(f"http://127.0.0.1:{port}")
    try:
        wait_until(found.answers, timeout_s=START_TIMEOUT_S, what="Flower")
        wait_until(lambda: toy_worker.hostname in found.get("/api/workers?refresh=1"))
        yield found
    finally:
        process.terminate()
        process.wait(GET_S)


def test_the_workers_page_shows_the_engines_figures(
    flower: Flower, toy_worker: WorkerProcess
) -> None:
    page = flower.get(f"/worker/{toy_worker.hostname}")
    for figure in ("Running jobs", "Tokens per s", "KV blocks used", "Prompt tokens", "Memory"):
        assert figure.lower() in page.lower()


def test_the_terminate_button_stops_a_running_generation(
    flower: Flower, toy_worker: WorkerProcess, client: Client
) -> None:
    job = begun(client.submit(prompt="SECRET", max_tokens=4000))
    shown = wait_until(lambda: flower.task(job.id))
    assert "a string of 6 characters" in shown
    assert "SECRET" not in shown
    flower.post(f"/api/task/revoke/{job.id}?terminate=true", terminate="true")
    with pytest.raises(Cancelled):
        job.result(GET_S)
    wait_until(lambda: '"REVOKED"' in flower.task(job.id))


def test_a_button_that_means_nothing_here_shows_why_and_the_worker_serves_on(
    flower: Flower, toy_worker: WorkerProcess, client: Client
) -> None:
    worker = toy_worker.hostname
    for path, fields, reason in (
        (f"/api/worker/queue/add-consumer/{worker}", {"queue": "other"}, "it serves llorch.toy"),
        (f"/api/worker/pool/grow/{worker}", {"n": "1"}, "LLORCH_MAX_SEQUENCES"),
        (f"/api/worker/pool/autoscale/{worker}", {"min": "1", "max": "2"}, "LLORCH_MAX_SEQUENCES"),
        ("/api/task/timeout/llorch.generate", {"workername": worker, "hard": "5"}, "deadline_s"),
    ):
        with pytest.raises(HTTPError) as caught:
            flower.post(path, **fields)
        assert reason in caught.value.read().decode() + caught.value.reason
    assert client.submit(prompt="x", max_tokens=2).result(GET_S).text == "w0 w1 "
