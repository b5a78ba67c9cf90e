"""What a client of a completion notices when parts die: at most a pause."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llorch_worker.client import Client
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import STOP_TIMEOUT_S, RedisServer, running_worker, wait_until
from tests.store import held_ids

PATH = "/v1/completions"
WHOLE = "w0 w1 w2 w3 w4 w5 "


@pytest.fixture
def own_http(own_gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_gateway.url, timeout=90) as client:
        yield client


def body(latch: Latch, **fields: Any) -> dict[str, Any]:
    return {"prompt": latch.prompt(after=2), "max_tokens": 6, **fields}


def choices(lines: Iterator[str]) -> Iterator[Any]:
    """The one choice of each chunk."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))["choices"][0]


def test_a_stream_goes_on_after_an_outage_of_redis(
    own_http: httpx.Client, own_server: RedisServer, latch: Latch
) -> None:
    with own_http.stream("POST", PATH, json=body(latch, stream=True)) as answer:
        chunks = choices(answer.iter_lines())
        text = next(chunks)["text"]
        own_server.halt()
        own_server.start()
        latch.open()
        rest = list(chunks)
    assert text + "".join(chunk["text"] for chunk in rest) == WHOLE
    assert rest[-1]["finish_reason"] == "length"


def test_an_answer_comes_after_an_outage_of_redis(
    own_http: httpx.Client, own_server: RedisServer, own_client: Client, latch: Latch
) -> None:
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(own_http.post(PATH, json=body(latch))))
    asking.start()
    wait_until(lambda: held_ids(own_client.redis))
    own_server.halt()
    own_server.start()
    latch.open()
    asking.join()
    assert answers[0].json()["choices"][0]["text"] == WHOLE


def test_a_stream_goes_on_when_its_worker_dies(
    own_server: RedisServer, latch: Latch, tmp_path: Path
) -> None:
    quick = {"model_name": "toy", "lease_s": 3, "sweep_s": 0.5}
    with (
        running_worker(own_server.url, tmp_path, **quick) as doomed,
        running_gateway(own_server.url, tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, timeout=90) as http,
        http.stream("POST", PATH, json=body(latch, stream=True)) as answer,
    ):
        chunks = choices(answer.iter_lines())
        text = next(chunks)["text"]
        doomed.process.kill()
        latch.open()
        with running_worker(own_server.url, tmp_path, name="w2", **quick):
            rest = list(chunks)
    assert text + "".join(chunk["text"] for chunk in rest) == WHOLE
    assert rest[-1]["finish_reason"] == "length"


def test_a_gateway_that_stops_answers_whoever_waits(
    own_gateway: GatewayProcess, own_http: httpx.Client, own_client: Client, make_latch: Any
) -> None:
    whole, streamed = make_latch("whole"), make_latch("streamed")
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(own_http.post(PATH, json=body(whole))))
    asking.start()
    with own_http.stream("POST", PATH, json=body(streamed, stream=True)) as answer:
        lines = answer.iter_lines()
        while "w0 " not in next(lines):
            pass
        wait_until(lambda: len(held_ids(own_client.redis)) == 2, what="both jobs to run")
        own_gateway.process.terminate()
        rest = list(lines)
    assert own_gateway.process.wait(STOP_TIMEOUT_S) is not None
    asking.join()
    assert answers[0].status_code == 503
    assert answers[0].headers["retry-after"]
    error = answers[0].json()["error"]
    assert (error["llorch_code"], error["retriable"]) == ("GATEWAY_STOPPING", True)
    assert "event: error" in rest
    assert json.loads(rest[-2].removeprefix("data: "))["error"] == error
    # Nobody waits for the jobs any more.
    whole.wait_ended(1)
    streamed.wait_ended(1)
