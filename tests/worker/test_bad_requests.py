"""Requests that break a rule, and engines that fail on one, are answered; the worker serves on."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from celery.result import AsyncResult

from llorch_worker.client import Client
from llorch_worker.contract import (
    TASK_NAME,
    ContextLengthExceeded,
    Failed,
    InternalError,
    InvalidRequest,
    LlorchError,
    ModelNotServed,
    OutOfMemory,
)
from tests.messages import QUEUE
from tests.services import WorkerProcess, wait_until
from tests.store import held_ids, id_for_key

GET_S = 60


@pytest.fixture(autouse=True)
def _serves_on(toy_worker: WorkerProcess, client: Client) -> Iterator[None]:
    yield
    assert client.submit(prompt="still there?", max_tokens=3).result(GET_S).text == "w0 w1 w2 "
    wait_until(lambda: not held_ids(client.redis), what="every message to be acknowledged")
    assert toy_worker.process.poll() is None


def failure(result: AsyncResult) -> LlorchError:
    with pytest.raises(LlorchError) as caught:
        result.get(timeout=GET_S)
    return caught.value


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"prompt": "x", "tempreature": 1}, "tempreature"),
        ({"prompt": "x", "self": 1}, "self"),
        ({"prompt": "x", "task": 1}, "task"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "prompt |"),
        ({"prompt": ""}, "prompt"),
        ({}, "prompt |"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "priority": 5}, "priority"),
        ({"prompt": "x", "tenant": "acme"}, "tenant"),
        ({"prompt": "half a character: \ud800"}, "prompt"),
        ({"prompt": "x", "metadata": {"\udfff": "\\ud800"}}, "metadata"),
    ],
    ids=ascii,
)
def test_a_request_that_breaks_a_rule_is_refused_by_name(
    stock: Celery, kwargs: dict[str, Any], field: str
) -> None:
    error = failure(stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE))
    assert isinstance(error, InvalidRequest)
    assert any(fault.field.startswith(field) for fault in error.faults)


def test_positional_arguments_are_refused_by_name(stock: Celery) -> None:
    error = failure(stock.send_task(TASK_NAME, args=["Once upon a time"], queue=QUEUE))
    assert isinstance(error, InvalidRequest)
    assert error.faults[0].field == "args"


def test_a_refused_job_ends_its_stream_with_the_reason(stock: Celery, client: Client) -> None:
    sent = stock.send_task(TASK_NAME, kwargs={"prompt": "x", "wrong": 1}, queue=QUEUE)
    (entry,) = client.job(sent.id).stream(timeout=GET_S)
    assert isinstance(entry.event, Failed)
    assert entry.event.error.code == "INVALID_REQUEST"
    wait_until(lambda: client.job(sent.id).status().state == "failed")


def test_a_prompt_of_30_mb_is_refused_with_its_size(stock: Celery) -> None:
    error = failure(stock.send_task(TASK_NAME, kwargs={"prompt": "x" * 30_000_000}, queue=QUEUE))
    assert isinstance(error, InvalidRequest)
    assert "30000000" in error.faults[0].got


@pytest.mark.parametrize(
    "value",
    [
        *(datetime(2026, 11, 28, tzinfo=UTC), date(2026, 11, 28), time(12), Decimal("0.5")),
        *(UUID(int=7), b"bytes", b"\xff\xfe"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("field", ["prompt", "seed", "metadata", "tools"])
def test_a_value_of_a_type_that_the_contract_lacks_is_refused_by_field(
    stock: Celery, field: str, value: object
) -> None:
    given = {"metadata": {"a": [value]}, "tools": [value]}.get(field, value)
    error = failure(stock.send_task(TASK_NAME, kwargs={"prompt": "x", field: given}, queue=QUEUE))
    assert isinstance(error, InvalidRequest)
    (fault,) = error.faults
    assert fault.field.partition(".")[0] == field


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("raise ValueError secret", InternalError),
        ("raise MemoryError secret", OutOfMemory),
        ("raise RuntimeError secret", InternalError),
        ("raise SystemExit secret", InternalError),
        ("raise KeyboardInterrupt secret", InternalError),
    ],
)
def test_a_defect_of_the_engine_ends_that_job_alone(
    client: Client, toy_worker: WorkerProcess, prompt: str, error: type[LlorchError]
) -> None:
    with pytest.raises(error) as caught:
        client.submit(prompt=prompt).result(GET_S)
    assert "secret" not in str(caught.value)
    assert "secret" not in toy_worker.text()


def test_token_ids_beyond_the_context_are_refused_before_they_are_sent(client: Client) -> None:
    with pytest.raises(ContextLengthExceeded, match="4096"):
        client.submit(prompt_token_ids=[1] * 4000, max_tokens=97)


def test_a_model_that_was_never_served_is_refused_with_the_known_ones(client: Client) -> None:
    with pytest.raises(ModelNotServed, match=r"'gpt-17' \(known models: toy\)$") as caught:
        client.submit(prompt="x", model="gpt-17")
    assert not caught.value.retriable, "another request may succeed, this one will not"


def test_a_reused_idempotency_key_of_a_stock_producer_is_refused(
    stock: Celery, client: Client
) -> None:
    first = client.submit(prompt="x", max_tokens=1, idempotency_key="order 66")
    kwargs = {"prompt": "x", "idempotency_key": "order 66"}
    error = failure(stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE))
    assert first.id in error.faults[0].rule
    assert id_for_key(client.redis, "toy", "order 66") == first.id


def test_the_idempotency_key_of_a_stock_producers_job_is_free_again_after_a_retriable_error(
    stock: Celery, client: Client
) -> None:
    kwargs = {"prompt": "raise ValueError", "max_tokens": 1, "idempotency_key": "order 67"}
    for _ in range(2):
        sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE)
        assert failure(sent).retriable
        assert id_for_key(client.redis, "toy", "order 67") == sent.id
    ours = client.submit(**kwargs)
    assert ours.id != sent.id
    assert id_for_key(client.redis, "toy", "order 67") == ours.id
