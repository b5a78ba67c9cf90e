"""Sets each variable that OpenTelemetry reads to what makes no sense, each in a process of its own.

``python otel_values.py`` prints a JSON document: surface, name, value, what it gave and what it
wrote. A fork before OpenTelemetry is imported saves the imports of everything else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module

import google.protobuf.descriptor_pool
import redis
import requests
from kombu.log import get_logger

from llorch_worker.client import Client
from llorch_worker.settings import Settings
from llorch_worker.telemetry.traces.publishing import publishing
from llorch_worker.telemetry.traces.tracing import is_traced, start_tracing

PRELOADED = (Client, Settings, get_logger, google.protobuf.descriptor_pool, redis, requests)
NOWHERE = "redis://127.0.0.1:1/0"


def traced_process() -> object:
    start_tracing("llorch-worker", "here")
    if not is_traced():
        return "no traces"
    from llorch_worker.telemetry.traces.attempts import AttemptSpans

    AttemptSpans().connect()
    with publishing("toy", "id") as headers:
        pass
    return sorted(headers)


def client() -> object:
    import opentelemetry.trace

    assert opentelemetry.trace
    for _ in range(2):
        with publishing("toy", "id") as headers:
            pass
    return sorted(headers)


def gateway() -> object:
    from llorch_worker.gateway.app import create_app
    from llorch_worker.gateway.settings import GatewaySettings

    # Not before ours, as in a gateway.
    testing = import_module("fastapi.testclient")

    app = create_app(Settings(redis_url=NOWHERE), GatewaySettings())
    http = testing.TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    return [http.get("/health").status_code, http.post("/v1/completions", json={}).status_code]


SURFACES: dict[str, Callable[[], object]] = {
    "process": traced_process,
    "client": client,
    "gateway": gateway,
}


def attempt(surface: str, name: str, value: str) -> tuple[object, str]:
    """What the surface gives with that value, and all that it writes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(writing, stream)
        os.close(reading)
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
        os.environ[name] = value
        logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
        try:
            given = json.dumps(SURFACES[surface]())
        except BaseException:  # noqa: BLE001 - it is what the test is about
            given = json.dumps(traceback.format_exc())
        os.write(2, f"\n{given}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        *lines, given = pipe.read().splitlines()
    os.waitpid(child, 0)
    return json.loads(given), "\n".join(lines).strip()


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps([[*case, *attempt(*case)] for case in cases]))
