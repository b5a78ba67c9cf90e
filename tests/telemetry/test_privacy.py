"""Nothing that users write, or that is written for them, is in a trace or a log."""

from __future__ import annotations

import base64
from contextlib import suppress

import httpx
import pytest
from celery import Celery, chain

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, LlorchError
from tests.gateways import GatewayProcess
from tests.services import WorkerProcess
from tests.telemetry.collector import Collector

QUEUE = "llorch.toy"
SECRET = "zqxPROMPTxqz"
GENERATED = "w0 w1 w2 w3 w4 w5 w6"
GET_S = 60


def disguises(text: str) -> set[bytes]:
    """``text`` as it may show: plain, and in base64 at each of the three alignments."""
    found = {text.encode()}
    for padding in range(3):
        found.add(base64.b64encode(b"\0" * padding + text.encode())[4:-4])
    return found


def assert_nothing_shows(collector: Collector, *logs: str) -> None:
    shown = b"".join(collector.bodies) + "".join(logs).encode()
    for secret in (SECRET, GENERATED):
        for disguise in disguises(secret):
            assert disguise not in shown


@pytest.mark.parametrize(
    "kwargs",
    [
        {"prompt": SECRET, "max_tokens": 20, "stop": [SECRET], "metadata": {"note": SECRET}},
        {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 20},
        {"prompt": SECRET, "max_tokens": SECRET},
        {"prompt": SECRET, "temperature": SECRET, SECRET: SECRET},
        {"prompt": f"raise ValueError {SECRET}"},
        {"prompt": f"raise MemoryError {SECRET}"},
        {"prompt": f"raise SystemExit {SECRET}"},
    ],
    ids=str,
)
def test_a_job_shows_nothing(
    kwargs: dict[str, object],
    stock: Celery,
    client: Client,
    traced_worker: WorkerProcess,
    collector: Collector,
) -> None:
    sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE)
    with suppress(LlorchError):
        client.job(sent.id).result(GET_S)
    collector.attempt(sent.id)
    assert_nothing_shows(collector, traced_worker.text())


def test_a_chain_shows_nothing(
    stock: Celery, traced_worker: WorkerProcess, collector: Collector
) -> None:
    job = stock.signature(TASK_NAME, kwargs={"prompt": SECRET, "max_tokens": 20}, queue=QUEUE)
    sent = chain(job, stock.signature("shop.next", queue="shop")).apply_async()
    collector.attempt(sent.parent.id)
    assert_nothing_shows(collector, traced_worker.text())


@pytest.mark.parametrize("stream", [False, True])
def test_http_shows_nothing(
    stream: bool, traced_worker: WorkerProcess, gateway: GatewayProcess, collector: Collector
) -> None:
    body = {"model": "toy", "prompt": SECRET, "max_tokens": 20, "stream": stream, "stop": SECRET}
    for wrong in ({}, {"max_tokens": SECRET}, {"logit_bias": {SECRET: SECRET}}):
        answer = httpx.post(
            f"{gateway.url}/v1/completions?prompt={SECRET}", json=body | wrong, timeout=60
        )
        assert answer.status_code == (400 if wrong else 200)
    collector.wait_until_named("POST /v1/completions")
    collector.wait_until_named("publish llorch.toy")
    assert_nothing_shows(collector, traced_worker.text(), gateway.log.read_text())
