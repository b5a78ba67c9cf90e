"""Structured output through the queue: stock producers, refusals, and a worker that dies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, InvalidRequest
from tests.services import REAL_APP, RedisServer, WorkerProcess, begun, running_worker

GET_S = 120
LEASE_S = 3.0
SECRET = "zsecretz"
SCHEMA = {
    "type": "object",
    "properties": {SECRET: {"type": "string", "maxLength": 20}, "kind": {"enum": [1, 2]}},
    "required": [SECRET, "kind"],
    "additionalProperties": False,
}
AS_SCHEMA: dict[str, Any] = {
    "prompt": "Once upon a time",
    "seed": 3,
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
}
LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 300,
    "n": 4,
    "seed": 3,
    "ignore_eos": True,
    "structured_outputs": {"regex": "([a-z]{2,9} [0-9]{2}, and so on; )+"},
}


def test_a_stock_producer_gets_what_its_schema_says(
    stock: Celery, story_worker: WorkerProcess, client: Client
) -> None:
    sent = stock.send_task(TASK_NAME, kwargs=AS_SCHEMA, queue="llorch.stories")
    result = sent.get(timeout=GET_S)
    assert result["choices"][0]["finish_reason"] == "stop"
    assert set(json.loads(result["text"])) == {SECRET, "kind"}
    assert client.submit(model="stories", **AS_SCHEMA).result(GET_S).text == result["text"]
    assert SECRET not in story_worker.text()


def test_the_reason_of_a_refusal_is_answered_and_nothing_private_logged(
    story_worker: WorkerProcess, client: Client
) -> None:
    pattern = {"regex": f"({SECRET}"}
    job = client.submit(model="stories", prompt="a", structured_outputs=pattern)
    with pytest.raises(InvalidRequest, match="unclosed group") as caught:
        job.result(GET_S)
    assert [fault.field for fault in caught.value.faults] == ["structured_outputs.regex"]
    assert SECRET not in story_worker.text()


@pytest.fixture
def start(
    redis_server: RedisServer, tmp_path: Path, trained_model: Path
) -> Iterator[Callable[[str], WorkerProcess]]:
    """Starts workers of a model of their own, with short leases."""
    with ExitStack() as workers:
        yield lambda name: workers.enter_context(
            running_worker(
                redis_server.url,
                tmp_path,
                app=REAL_APP,
                name=name,
                model=trained_model / "f32.gguf",
                model_name="twins",
                lease_s=LEASE_S,
                sweep_s=0.5,
            )
        )


def test_a_job_whose_worker_is_killed_goes_on_in_its_grammar(
    start: Callable[[str], WorkerProcess], client: Client
) -> None:
    first = start("first")
    expected = client.submit(model="twins", **LONG).result(GET_S)
    job = begun(client.submit(model="twins", **LONG))
    first.process.kill()
    first.process.wait()
    start("second")
    result = job.result(GET_S)
    assert result.choices == expected.choices
    assert result.attempts == 2
