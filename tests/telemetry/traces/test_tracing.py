"""Traces are off unless ``OTEL_*`` asks for them, and never stand in a job's way."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llorch_worker.client import Client
from tests.services import LOCALHOST, RedisServer, free_port, run_python, running_worker, wait_until
from tests.telemetry.collector import SPEED

START = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr)
{first}
from llorch_worker.telemetry.traces.tracing import is_traced, start_tracing
from llorch_worker.telemetry.traces.publishing import publishing
tracing = start_tracing("test", "here")
with publishing("toy", "an id") as headers:
    pass
loaded = [name for name in ("opentelemetry.sdk.trace", "requests") if name in sys.modules]
tracing.close()
print(json.dumps([is_traced(), loaded, sorted(headers)]))
"""
ON = [True, ["opentelemetry.sdk.trace", "requests"], ["traceparent"]]
OFF: list[object] = [False, [], []]


SWITCHES: list[tuple[dict[str, str], list[object]]] = [
    ({}, OFF),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, ON),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, ON),
    ({"OTEL_TRACES_EXPORTER": "otlp"}, ON),
    ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:9"}, OFF),
    ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:9"}, OFF),
    ({"OTEL_TRACES_EXPORTER": "console"}, OFF),
    ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, OFF),
]


def test_otel_variables_turn_traces_on_and_off() -> None:
    def told(variables: dict[str, str]) -> tuple[dict[str, str], list[object]]:
        return variables, run_python(START.format(first=""), "redis://unused", **variables)

    # At once, because those that have traces wait for a collector at their end.
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(told, [variables for variables, _ in SWITCHES])) == SWITCHES


def test_a_missing_extra_is_a_warning(redis_server: RedisServer) -> None:
    hide = "sys.modules['opentelemetry.exporter'] = None"
    variables = {"OTEL_TRACES_EXPORTER": "otlp"}
    source = START.format(first=hide).replace("sys.stderr", "sys.stdout")
    assert run_python(source, redis_server.url, **variables)[0] is False


@pytest.mark.parametrize("answers", [False, True], ids=["refuses", "is silent"])
def test_a_dead_collector_delays_neither_jobs_nor_the_end(
    answers: bool, own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with socket.socket() as silent:
        if answers:
            silent.bind((LOCALHOST, 0))
            silent.listen()
        port = silent.getsockname()[1] if answers else free_port()
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{LOCALHOST}:{port}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": 300,  # seconds
            **SPEED,
        }
        with running_worker(own_server.url, tmp_path, model_name="toy", **variables) as worker:
            for _ in range(3):
                own_client.submit(prompt="x", max_tokens=2).result(120)
                if not answers:
                    wait_until(lambda: "takes no traces" in worker.text())
            worker.process.terminate()
            assert worker.wait_exit(60) == 0
            assert worker.text().count("takes no traces") == (0 if answers else 1)
            assert "Traceback" not in worker.text()
