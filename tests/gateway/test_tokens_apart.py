"""Tokens that come one by one are an event each, in the first stream of a fresh gateway too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.gateway import sse
from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, WorkerProcess, running_worker

TOKENS = 12
LATE_S = 0.03
CHAT = {"messages": [{"role": "user", "content": "x"}]}
OF_CHOICES = ("choices", 0)


@pytest.fixture(scope="module")
def slow_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """So few of its steps are between two writes that none are merged for a reader."""
    folder = tmp_path_factory.mktemp("worker")
    with running_worker(redis_server.url, folder, model_name="toy", TOY_STEP_MS=30) as process:
        yield process


@pytest.fixture
def fresh_gateway(
    slow_worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> Iterator[GatewayProcess]:
    """A gateway far from Redis: it connects to read a job when the worker has written already."""
    with (
        FaultProxy(LOCALHOST, redis_server.port) as proxy,
        running_gateway(proxy.url, tmp_path) as gateway,
    ):
        proxy.delay(LATE_S)
        yield gateway


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("completions", {"prompt": "x", "max_tokens": TOKENS}, (*OF_CHOICES, "text")),
        ("chat/completions", CHAT | {"max_tokens": TOKENS}, (*OF_CHOICES, "delta", "content")),
        ("messages", CHAT | {"model": "toy", "max_tokens": TOKENS}, ("delta", "text")),
        ("responses", {"input": "x", "max_output_tokens": TOKENS}, ("delta",)),
    ],
)
def test_a_stream(
    fresh_gateway: GatewayProcess, path: str, body: dict[str, Any], text: tuple[Any]
) -> None:
    url = f"{fresh_gateway.url}/v1/{path}"
    answer = httpx.post(url, json=body | {"stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    texts = [found for each in data if (found := _at(json.loads(each), *text))]
    assert texts == [f"w{number} " for number in range(TOKENS)]


def test_a_job_that_is_enqueued_to_be_streamed(fresh_gateway: GatewayProcess) -> None:
    url, body = f"{fresh_gateway.url}/v1/jobs", {"prompt": "x", "max_tokens": TOKENS}
    job = httpx.post(url, params={"stream": True}, json=body, timeout=60).json()
    events = [each.event for each in sse.read(fresh_gateway.url, job["id"])]
    assert [event.type for event in events] == ["started", *["tokens"] * TOKENS, "finished"]


def _at(document: Any, *path: Any) -> Any:
    for name in path:
        if isinstance(name, str) and not isinstance(document, Mapping):
            return None
        document = document.get(name) if isinstance(name, str) else document and document[name]
    return document
