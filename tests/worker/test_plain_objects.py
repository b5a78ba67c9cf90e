"""Objects that look like values of kombu's types go through the queue as what they are."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain
from celery.result import AsyncResult

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, InvalidRequest
from llorch_worker.contract.plain_objects import MARK, unmark_plain
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app
from tests.messages import QUEUE
from tests.services import WorkerProcess
from tests.store import letters_in

GET_S = 60
LOOKALIKES: list[dict[str, Any]] = [
    {"__type__": "decimal", "__value__": "x"},
    {"__type__": "uuid", "__value__": {"hex": "0" * 32}},
    {"__type__": "datetime", "__value__": "2026-11-28"},
    {"__type__": "bytes", "__value__": "x"},
    {"__type__": "of ours", "__value__": {"__type__": 7, "__value__": None}},
    {"__type__": [], "__value__": {}},
    {"__type__": 1, "__value__": 2, MARK: 3},
    {"__type__": "uuid", "__value__": {"hex": "0" * 32}, MARK: []},
    {"__type__": "uuid", "__value__": {"hex": "0" * 32}, MARK: [[]]},
]
METADATA = {"all": LOOKALIKES, "nulls": [None, {"a": None}]}


@pytest.fixture(autouse=True)
def _leaves_no_letter(toy_worker: WorkerProcess, client: Client) -> Any:
    yield
    assert letters_in(client.redis) == []


def fields(**others: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 1, "metadata": METADATA} | others


def test_our_clients_get_the_metadata_that_they_sent(client: Client) -> None:
    for metadata in (METADATA, *LOOKALIKES):
        job = client.submit(**fields(metadata=metadata))
        assert job.result(GET_S).metadata == metadata


def test_schemas_tools_and_template_variables_may_have_such_names(client: Client) -> None:
    schema = {"type": "object", "properties": {"__type__": {}, "__value__": {}}}
    asked = fields(
        prompt=None,
        messages=[{"role": "user", "content": "x"}],
        tools=[{"function": {"name": "f", "parameters": schema | {"default": LOOKALIKES[0]}}}],
        response_format={"type": "json_schema", "json_schema": {"schema": schema}},
        chat_template_kwargs={"x": LOOKALIKES},
    )
    assert client.submit(**asked).result(GET_S).text == "w0 "


def test_a_stock_producer_reads_its_result_as_objects(stock: Celery, client: Client) -> None:
    sent = client.submit(**fields())
    found = AsyncResult(sent.id, app=stock).get(timeout=GET_S)["metadata"]
    assert unmark_plain(found) == METADATA
    assert found["all"][0] == LOOKALIKES[0] | {MARK: []}


def test_our_task_sends_and_gets_them_as_they_are(
    toy_worker: WorkerProcess, client: Client
) -> None:
    app = build_app(Settings(redis_url=toy_worker.redis_url, model_name="toy"))
    sent = app.tasks[TASK_NAME].delay(**fields())
    assert sent.get(timeout=GET_S)["metadata"] == METADATA
    assert client.job(sent.id).result(GET_S).metadata == METADATA


def test_what_kombu_would_fail_on_is_an_object_of_a_stock_producer_too(
    stock: Celery, client: Client
) -> None:
    metadata = {
        "a": {"__type__": "decimal", "__value__": "x"},
        "b": {"__type__": 7, "__value__": 8},
    }
    sent = stock.send_task(TASK_NAME, kwargs=fields(metadata=metadata), queue=QUEUE)
    assert client.job(sent.id).result(GET_S).metadata == metadata


def test_the_next_task_of_a_chain_gets_what_it_was_sent(stock: Celery, client: Client) -> None:
    marked = {"a": {"__type__": "uuid", "__value__": {"hex": "0" * 32}, MARK: []}}
    plain = {"a": {"__type__": "uuid", "__value__": {"hex": "0" * 32}}}
    first, second = (
        stock.signature(TASK_NAME, kwargs=fields(metadata=marked), queue=QUEUE, immutable=True)
        for _ in range(2)
    )
    sent = chain(first, second).apply_async()
    assert client.job(sent.id).result(GET_S).metadata == plain
    assert client.job(sent.parent.id).result(GET_S).metadata == plain


def test_such_an_object_in_the_place_of_a_text_is_refused_by_field(client: Client) -> None:
    for name in ("prompt", "affinity_key", "model"):
        with pytest.raises(InvalidRequest, match=name):
            client.submit(**fields(**{name: LOOKALIKES[0]}))
