"""The trace of a job crosses the queue, whoever sent it and however often it is delivered."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Cancelled, InvalidRequest
from tests.latch import Latch
from tests.services import (
    RedisServer,
    WorkerProcess,
    begun,
    run_python,
    running_worker,
)
from tests.telemetry.collector import Collector

QUEUE = "llorch.toy"
GET_S = 60
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
CONSUMER, INTERNAL, ERROR = 5, 1, 2
INSTRUMENTED = """
import json, os
from celery import Celery
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider

trace.set_tracer_provider(TracerProvider())
CeleryInstrumentor().instrument()
url = os.environ["LLORCH_REDIS_URL"]
app = Celery("shop", broker=url, backend=url)

@app.task(name="llorch.generate")
def generate(**fields): ...

with trace.get_tracer("shop").start_as_current_span("buy") as span:
    sent = generate.apply_async(kwargs={"prompt": "x", "max_tokens": 2}, queue="llorch.toy")
sent.get(timeout=120)
print(json.dumps([sent.id, f"{span.get_span_context().trace_id:032x}"]))
"""
TRACED_CLIENT = """
import asyncio, json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from llorch_worker.client import AsyncClient

trace.set_tracer_provider(TracerProvider())

async def main():
    async with AsyncClient() as client:
        with trace.get_tracer("shop").start_as_current_span("buy") as span:
            job = await client.submit(prompt="x", max_tokens=2)
        await job.result(120)
        print(json.dumps([job.id, f"{span.get_span_context().trace_id:032x}"]))

asyncio.run(main())
"""


@pytest.mark.parametrize("source", [INSTRUMENTED, TRACED_CLIENT], ids=["stock", "client"])
def test_a_traced_producers_trace_goes_on_in_the_worker(
    source: str, redis_server: RedisServer, traced_worker: WorkerProcess, collector: Collector
) -> None:
    job_id, trace_id = run_python(source, redis_server.url)
    attempt = collector.attempt(job_id)
    assert attempt.trace_id == trace_id
    assert attempt.kind == CONSUMER
    assert attempt.parent_id


def test_headers_that_are_no_trace_do_no_harm(
    stock: Celery, traced_worker: WorkerProcess, collector: Collector
) -> None:
    for value in ("SECRET", 5, ["SECRET"], {"a": "SECRET"}, "00-" + "g" * 52, "x" * 9_000):
        headers = {"traceparent": value, "tracestate": value, "llorch_attempt": value}
        sent = stock.send_task(
            TASK_NAME, kwargs={"prompt": "x", "max_tokens": 1}, queue=QUEUE, headers=headers
        )
        assert sent.get(timeout=GET_S)["usage"]["completion"] == 1
        assert collector.attempt(sent.id).parent_id == ""
    assert "SECRET" not in traced_worker.text()


def test_a_refused_job_and_a_cancelled_one_end_their_spans(
    stock: Celery, client: Client, traced_worker: WorkerProcess, collector: Collector
) -> None:
    refused = stock.send_task(TASK_NAME, kwargs={"prompt": "x", "max_tokens": 0}, queue=QUEUE)
    with pytest.raises(Exception, match="max_tokens"):
        refused.get(timeout=GET_S)
    span = collector.attempt(refused.id)
    assert span.attributes["error.type"] == InvalidRequest.code
    assert span.attributes["llorch.outcome"] == "failed"
    assert span.status == ERROR
    cancelled = begun(client.submit(prompt="x", max_tokens=4000))
    cancelled.cancel()
    with pytest.raises(Cancelled):
        cancelled.result(GET_S)
    span = collector.attempt(cancelled.id)
    assert span.attributes["llorch.outcome"] == "cancelled"
    assert span.status != ERROR


def test_the_next_task_of_a_chain_carries_the_trace_on(
    stock: Celery, client: Client, traced_worker: WorkerProcess, collector: Collector
) -> None:
    job = stock.signature(TASK_NAME, kwargs={"prompt": "x", "max_tokens": 2}, queue=QUEUE)
    chain(job.set(headers=HEADERS), stock.signature("shop.next", queue="shop")).apply_async()
    message = json.loads(client.redis.blpop(["shop"], timeout=GET_S)[1])
    attempt = collector.attempt(message["headers"]["parent_id"])
    assert attempt.trace_id == TRACE
    assert message["headers"]["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
    assert base64.b64decode(message["body"])


def test_a_job_of_a_killed_worker_is_a_second_attempt_in_the_same_trace(
    own_server: RedisServer,
    own_client: Client,
    tmp_path: Path,
    collector: Collector,
    latch: Latch,
) -> None:
    options: dict[str, Any] = {
        "model_name": "toy", "max_sequences": 2, "TOY_STEP_MS": 5, "lease_s": 3, "sweep_s": 0.5,
        **collector.environment(),
    }  # fmt: skip
    with Celery("stock", broker=own_server.url, set_as_current=False) as stock:
        with running_worker(own_server.url, tmp_path, name="dies", **options) as dies:
            kwargs = {"prompt": latch.prompt(2), "max_tokens": 4}
            sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE, headers=HEADERS)
            job = begun(own_client.job(sent.id))
            dies.process.kill()
        with running_worker(own_server.url, tmp_path, name="lives", **options):
            latch.open()
            assert job.result(GET_S).attempts == 2
            attempt = collector.attempt(job.id, 2)
    assert attempt.trace_id == TRACE
    assert attempt.parent_id == PARENT
    assert collector.of_job(job.id).keys() >= {"process llorch.toy", "prefill", "decode"}


def test_a_drained_job_leaves_a_span_in_each_worker(
    own_server: RedisServer,
    own_client: Client,
    tmp_path: Path,
    collector: Collector,
    make_latch: Callable[[str], Latch],
) -> None:
    options: dict[str, Any] = {
        "model_name": "toy", "TOY_STEP_MS": 5, "drain_s": 0, **collector.environment()
    }  # fmt: skip
    latch = make_latch("drained")
    with running_worker(own_server.url, tmp_path, name="leaves", **options) as leaves:
        job = begun(own_client.submit(prompt=latch.prompt(2), max_tokens=4))
        assert leaves.stop() == 0
    assert collector.attempt(job.id).attributes["llorch.outcome"] == "continues elsewhere"
    with running_worker(own_server.url, tmp_path, name="goes-on", **options):
        latch.open()
        job.result(GET_S)
    attempts = [
        span.attributes["llorch.outcome"]
        for span in collector.spans
        if span.attributes.get("messaging.message.id") == job.id
    ]
    assert attempts == ["continues elsewhere", "length"]


def test_an_instrumented_application_has_one_consumer_span_a_job(
    own_server: RedisServer, own_client: Client, tmp_path: Path, collector: Collector
) -> None:
    app = "tests.telemetry.instrumented_app"
    with running_worker(
        own_server.url, tmp_path, app=app, model_name="toy", **collector.environment()
    ):
        first, second = (own_client.submit(prompt="x", max_tokens=2) for _ in range(2))
        for job in (first, second):
            job.result(GET_S)
            spans = collector.wait_for(job.id, f"run/{TASK_NAME}", "process llorch.toy")
            run, process = spans[f"run/{TASK_NAME}"], spans["process llorch.toy"]
            assert process.parent_id == run.span_id
            assert [run.kind, process.kind] == [CONSUMER, INTERNAL]
            assert run.parent_id == ""
    assert collector.attempt(first.id).trace_id != collector.attempt(second.id).trace_id
