"""Flower beside a real worker: what its pages show, what it keeps, what its buttons do."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.error import HTTPError

import pytest
from celery import Celery

from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Cancelled, InvalidRequest
from tests.flowers import Flower, running_flower
from tests.services import (
    RedisServer,
    WorkerProcess,
    begun,
    own_redis,
    running_worker,
    wait_until,
)

pytest.importorskip("flower", reason="needs the flower extra")

GET_S = 60


@pytest.fixture(scope="module")
def flower(
    redis_server: RedisServer, toy_worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flower]:
    with running_flower(redis_server.url, tmp_path_factory.mktemp("flower")) as found:
        wait_until(lambda: toy_worker.hostname in found.get("/api/workers?refresh=1"))
        yield found


def test_the_workers_page_shows_the_engines_figures_in_units(
    flower: Flower, toy_worker: WorkerProcess
) -> None:
    page = flower.get(f"/worker/{toy_worker.hostname}")
    for figure, shown in (
        ("Running jobs", "0"),
        # Flower would write a string as "Toy", and q8_0 as "Q8 0".
        ("Model", "toy"),
        ("Sequences", "0 running, 0 waiting, at most 4"),
        ("Context", "4,096 tokens"),
        ("Speed", "0.0 tokens/s"),
        ("KV cache", "0.0% used, 0 of 1 blocks"),
        ("Memory", "weights 0 B, kv 0 B, rope 0 B, masks 0 B"),
    ):
        assert f"<td>{figure}</td> <td>{shown}</td>" in " ".join(page.split())


def test_a_job_shows_its_sizes_and_its_end_but_no_text(flower: Flower, client: Client) -> None:
    job = client.submit(prompt="SECRET", max_tokens=3)
    job.result(GET_S)
    shown = flower.ended(job.id, "SUCCESS")
    assert shown["result"] == "<length, 1 prompt + 3 new tokens>"
    assert shown["kwargs"].startswith("model=toy, prompt=a string of 6 characters, max_tokens=3")
    assert "SECRET" not in str(shown)


def test_a_refusal_has_a_reason_and_no_traceback(flower: Flower, stock: Celery) -> None:
    fields = {"prompt": "SECRET", "top_p": 2}
    sent = stock.send_task(TASK_NAME, kwargs=fields, queue="llorch.toy")
    with pytest.raises(InvalidRequest):
        sent.get(timeout=GET_S)
    shown = flower.ended(sent.id, "FAILURE")
    assert shown["exception"].startswith("InvalidRequest('top_p: ")
    assert shown["traceback"] is None
    assert "SECRET" not in str(shown)


def test_metrics_need_no_login_and_count_runtimes_of_minutes(
    flower: Flower, client: Client
) -> None:
    job = client.submit(prompt="x", max_tokens=2)
    job.result(GET_S)
    flower.ended(job.id, "SUCCESS")
    with urllib.request.urlopen(f"{flower.url}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    for bound in ("0.3", "60.0", "7680.0"):
        assert f'flower_task_runtime_seconds_bucket{{le="{bound}",task="llorch.generate"' in metrics


def test_the_terminate_button_stops_a_running_generation(
    flower: Flower, toy_worker: WorkerProcess, client: Client
) -> None:
    job = begun(client.submit(prompt="x", max_tokens=4000))
    wait_until(lambda: flower.task(job.id))
    flower.post(f"/api/task/revoke/{job.id}?terminate=true", terminate="true")
    with pytest.raises(Cancelled):
        job.result(GET_S)
    flower.ended(job.id, "REVOKED")


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


def test_a_flower_older_than_the_workers_lists_the_queues_of_each(tmp_path: Path) -> None:
    with (
        own_redis() as server,
        FleetClient(server.url) as fleet,
        running_flower(server.url, tmp_path) as flower,
    ):
        assert "llorch.Llama-2" not in flower.get("/broker")
        for name in ("w1", "w2"):
            model = f"Llama-2-7b_{name}"
            with running_worker(server.url, tmp_path, name=name, model_name=model) as worker:
                # A worker may be ready a moment before it hears Celery's commands.
                wait_until(partial(fleet.answering, {worker.hostname}))
                shared = f"llorch.{model}"
                page, api = flower.get("/broker"), flower.get("/api/queues/length")
                for queue in (shared, f"{shared}:high"):
                    assert f"<td>{queue}</td>" in page
                    assert f'"name": "{queue}"' in api
        with (
            pytest.raises(HTTPError, match="401"),
            urllib.request.urlopen(f"{flower.url}/broker", timeout=60),
        ):
            pass


def test_a_job_shows_its_models_name_and_why_it_failed_where_the_list_has_room(
    flower: Flower, stock: Celery
) -> None:
    model = "meta-llama/Llama-2-7b-chat"
    sent = stock.send_task(
        TASK_NAME, kwargs={"prompt": "SECRET", "model": model, "top_p": 2}, queue="llorch.toy"
    )
    shown = flower.ended(sent.id, "FAILURE")
    assert shown["kwargs"].startswith(f"model={model}, prompt=a string of 6 characters, ")
    columns = re.findall(r'data-column="(\w+)"', flower.get("/tasks"))
    # On 1400 pixels: 400 each for these two, and 490 for the id and the state.
    assert columns[:4] == ["uuid", "state", "kwargs", "exception"]


def test_tasks_outlive_the_death_of_flower(flower: Flower, client: Client) -> None:
    job = client.submit(prompt="x", max_tokens=2)
    job.result(GET_S)
    flower.ended(job.id, "SUCCESS")
    flower.wait_saved()
    flower.kill()
    flower.start()
    assert flower.task(job.id)["state"] == "SUCCESS"
