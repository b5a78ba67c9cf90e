"""Sampling as the model's makers set it: every producer takes it, and no worker does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery

from llorch_worker.client import AsyncClient, Client
from llorch_worker.contract import TASK_NAME
from tests.cli.command import run
from tests.gateways import running_gateway
from tests.messages import QUEUE
from tests.services import RedisServer, WorkerProcess, own_redis, running_worker, wait_until

CONFIG = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
HEADER = "x-llorch-generation-config"
SHOWN = "temperature=0.6, top_p=0.9, top_k=20"
GET_S = 60


@pytest.fixture(scope="module", autouse=True)
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("worker")
    with running_worker(
        redis_server.url, folder, model_name="toy", TOY_GENERATION_CONFIG=json.dumps(CONFIG)
    ) as process:
        yield process


def result(http: httpx.Client, job_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = http.get(f"/v1/jobs/{job_id}").json()
        return found.get("result")

    found = wait_until(look)
    assert found is not None
    return found


def test_the_clients_take_what_a_request_does_not_name_and_say_so(client: Client) -> None:
    assert client.model_card().generation_config == CONFIG
    job = client.submit(prompt="x", max_tokens=1, top_k=0)
    rest = {"temperature": 0.6, "top_p": 0.9}
    assert (job.generation_config, job.result(GET_S).generation_config) == (rest, rest)

    async def submit() -> Any:
        async with AsyncClient(client.settings) as other:
            job = await other.submit(prompt="x", max_tokens=1)
            return job.generation_config, (await job.result(GET_S)).generation_config

    assert asyncio.run(submit()) == (CONFIG, CONFIG)
    none = client.settings.model_copy(update={"generation_config": "none"})
    with Client(none) as other:
        assert other.submit(prompt="x", max_tokens=1).result(GET_S).generation_config is None


def test_a_stock_producers_job_has_the_defaults_of_the_contract(stock: Celery) -> None:
    sent = stock.send_task(TASK_NAME, kwargs={"prompt": "x", "max_tokens": 1}, queue=QUEUE)
    assert "generation_config" not in sent.get(timeout=GET_S)


def test_a_key_finds_its_job_whatever_is_taken_meanwhile(client: Client) -> None:
    fields: dict[str, Any] = {"prompt": "x", "max_tokens": 1, "idempotency_key": "config"}
    first = client.submit(**fields)
    none = client.settings.model_copy(update={"generation_config": "none"})
    with Client(none) as other:
        again = other.submit(**fields)
        assert (again.id, again.generation_config) == (first.id, {})
        assert again.result(GET_S).generation_config == CONFIG


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ],
)
def test_every_api_takes_it_and_names_it_in_a_header(
    http: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = {"model": "toy", "stream": stream, **body}
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.headers[HEADER]) == (200, SHOWN)
    if not stream and path != "/v1/messages":
        assert answer.json()["llorch_generation_config"] == CONFIG
    nulls = http.post(path, json={**body, "temperature": None, "top_p": 1, "top_k": 0})
    assert nulls.headers[HEADER] == "temperature=0.6"
    greedy = http.post(path, json={**body, "temperature": 0})
    assert HEADER not in greedy.headers


def test_a_response_shows_it_from_its_beginning(http: httpx.Client) -> None:
    body = {"model": "toy", "input": "x", "max_output_tokens": 2, "background": True}
    made = http.post("/v1/responses", json=body)
    assert (made.json()["temperature"], made.json()["top_p"]) == (0.6, 0.9)
    assert made.headers[HEADER] == SHOWN


def test_jobs_and_lists_of_models_have_it(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["generation_config"] == CONFIG
    job = http.post("/v1/jobs", json={"prompt": "x", "max_tokens": 1}).json()
    assert result(http, job["id"])["generation_config"] == CONFIG


def test_a_gateway_that_is_told_not_to_takes_nothing(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLORCH_GENERATION_CONFIG", "none")
    with running_gateway(redis_server.url, tmp_path) as gateway:
        body = {"model": "toy", "prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body)
        assert HEADER not in answer.headers
        (model,) = httpx.get(f"{gateway.url}/v1/models").json()["data"]
        assert model["generation_config"] == {}


def test_a_repeated_key_is_not_said_to_take_anything_new(http: httpx.Client) -> None:
    body = {"model": "toy", "prompt": "x", "max_tokens": 1, "idempotency_key": "again"}
    first, again = (http.post("/v1/completions", json=body) for _ in range(2))
    assert (first.headers[HEADER], HEADER in again.headers) == (SHOWN, False)
    assert first.json()["llorch_generation_config"] == again.json()["llorch_generation_config"]


def test_a_worker_that_is_told_not_to_announces_nothing(tmp_path: Path) -> None:
    with (
        own_redis() as server,
        running_worker(
            server.url,
            tmp_path,
            TOY_GENERATION_CONFIG=json.dumps(CONFIG),
            generation_config="none",
        ),
        Client(server.url) as client,
    ):
        assert client.model_card().generation_config == {}


def test_the_commands_line_says_how_it_samples(redis_server: RedisServer) -> None:
    url = ("--redis", redis_server.url)
    ran = run("submit", "x", "--max-tokens", "1", "--wait", *url)
    assert ran.code == 0, ran
    assert "sampling as the model's makers set it: temperature 0.6, top_p 0.9, top_k 20" in ran.err
    ran = run("submit", "x", "--max-tokens", "1", "--wait", *url, LLORCH_GENERATION_CONFIG="none")
    assert "sampling: temperature 0.7, top_p 0.95" in ran.err
    ran = run("submit", "x", "--max-tokens", "1", "-t", "0", "--wait", *url)
    assert "sampling" not in ran.err
