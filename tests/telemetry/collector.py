"""A collector: receives OTLP over HTTP and keeps what it got."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import wait_until

SPEED = {"OTEL_BSP_SCHEDULE_DELAY": 50}
"""Milliseconds between two exports, for tests that wait for spans."""


@dataclass(frozen=True)
class Received:
    """A span. Times are in ns."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any] = field(hash=False)


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []
        self.spans: list[Received] = []

    def environment(self) -> dict[str, object]:
        """The variables that send a process' spans here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, **SPEED}

    def of_job(self, job_id: str) -> dict[str, Received]:
        """The spans of the trace that the job belongs to, by name; the last of each."""
        spans = list(self.spans)
        traces = {span.trace_id for span in spans if span.attributes.get(MESSAGE) == job_id}
        return {span.name: span for span in spans if span.trace_id in traces}

    def wait_for(self, job_id: str, *names: str) -> dict[str, Received]:
        wait_until(lambda: {*names} <= self.of_job(job_id).keys(), what=f"spans {names}")
        return self.of_job(job_id)

    def wait_until_named(self, name: str) -> None:
        wait_until(lambda: any(span.name == name for span in list(self.spans)), what=name)

    def attempt(self, job_id: str, number: int = 1) -> Received:
        """The span of that attempt at the job."""

        def found() -> list[Received]:
            return [
                span
                for span in list(self.spans)
                if span.attributes.get(MESSAGE) == job_id
                and span.attributes.get("llorch.attempt") == number
            ]

        return wait_until(found, what=f"attempt {number} at {job_id}")[0]

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for of_resource in request.resource_spans:
            service = _plain(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [_received(span, service) for span in of_scope.spans]


MESSAGE = "messaging.message.id"


def _received(span: Any, service: str) -> Received:
    return Received(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        status=span.status.code,
        attributes=_plain(span.attributes),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
