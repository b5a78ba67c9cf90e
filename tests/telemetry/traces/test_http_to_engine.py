"""One trace leads from an HTTP request through the queue into the engine."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from llorch_worker.client import Client
from tests.gateways import GatewayProcess
from tests.services import REAL_APP, RedisServer, WorkerProcess, running_worker
from tests.telemetry.collector import Collector, Received

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SERVER, PRODUCER, CONSUMER, INTERNAL = 2, 4, 5, 1
PARTS = ("queue", "prefill", "decode")


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("demo")
    options = {"app": REAL_APP, "name": "demo", "model_name": "demo"}
    with running_worker(redis_server.url, folder, **options, **collector.environment()) as worker:
        yield worker


def complete(
    gateway: GatewayProcess, query: str = "", trace: str = TRACE, **fields: object
) -> httpx.Response:
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8} | fields
    headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
    return httpx.post(
        f"{gateway.url}/v1/completions{query}", json=body, headers=headers, timeout=60
    )


@pytest.fixture(scope="module")
def spans(
    worker: WorkerProcess, gateway: GatewayProcess, collector: Collector
) -> dict[str, Received]:
    """Those of one completion, by name."""
    answer = complete(gateway, "?which=QUERY", temperature=0.5, seed=7)
    assert answer.status_code == 200, answer.text
    job_id = answer.json()["id"].removeprefix("cmpl-")
    names = ("POST /v1/completions", "publish llorch.demo", "process llorch.demo", *PARTS)
    return collector.wait_for(job_id, *names)


def test_the_callers_trace_goes_on_from_span_to_span(spans: dict[str, Received]) -> None:
    request, publish = spans["POST /v1/completions"], spans["publish llorch.demo"]
    process = spans["process llorch.demo"]
    assert {span.trace_id for span in spans.values()} == {TRACE}
    assert request.parent_id == CALLER
    assert publish.parent_id == request.span_id
    assert process.parent_id == spans["queue"].parent_id == publish.span_id
    assert spans["prefill"].parent_id == spans["decode"].parent_id == process.span_id
    assert [request.kind, publish.kind, process.kind] == [SERVER, PRODUCER, CONSUMER]
    assert [request.service, process.service] == ["llorch-gateway", "llorch-worker"]


def test_the_spans_of_a_job_follow_each_other(spans: dict[str, Received]) -> None:
    process = spans["process llorch.demo"]
    queue, prefill, decode = map(spans.get, PARTS)
    assert queue is not None
    assert prefill is not None
    assert decode is not None
    assert queue.start <= queue.end == process.start
    assert process.start <= prefill.start <= prefill.end == decode.start < decode.end
    assert decode.end <= process.end


def test_attributes_follow_the_conventions(spans: dict[str, Received]) -> None:
    request, process = spans["POST /v1/completions"], spans["process llorch.demo"]
    assert request.attributes["http.route"] == "/v1/completions"
    assert request.attributes["http.request.method"] == "POST"
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["url.query"] == "REDACTED"
    told = {name: value for name, value in process.attributes.items() if name.startswith("gen_ai.")}
    assert told.pop("gen_ai.usage.input_tokens") > 0
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "llorch",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 8,
    }
    assert process.attributes["messaging.destination.name"] == "llorch.demo"
    assert process.attributes["llorch.attempt"] == 1
    assert process.attributes["llorch.outcome"] == "length"


def test_a_streamed_answer_is_traced_to_its_end(
    worker: WorkerProcess, gateway: GatewayProcess, collector: Collector
) -> None:
    other = TRACE[::-1]
    answer = complete(gateway, trace=other, stream=True)
    assert "[DONE]" in answer.text
    job_id = answer.text.split('"id":"cmpl-')[1].split('"')[0]
    spans = collector.wait_for(job_id, "POST /v1/completions", "decode")
    assert spans["decode"].trace_id == other
    assert spans["POST /v1/completions"].end >= spans["decode"].end


def test_polled_endpoints_have_no_spans(gateway: GatewayProcess, collector: Collector) -> None:
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert httpx.get(f"{gateway.url}/v1/jobs/none").status_code == 404
    collector.wait_until_named("GET /v1/jobs/{job_id}")
    assert not [span for span in collector.spans if "health" in span.name]


def test_a_client_without_traces_begins_one_in_the_worker(
    worker: WorkerProcess, client: Client, collector: Collector
) -> None:
    job = client.submit(prompt="Once", max_tokens=2)
    job.result(120)
    spans = collector.wait_for(job.id, "process llorch.demo", *PARTS)
    assert spans["process llorch.demo"].parent_id == ""
    assert spans["decode"].parent_id == spans["process llorch.demo"].span_id
