"""Whatever ``OTEL_*`` says, a service runs: with one warning, and without traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import opentelemetry.environment_variables
import opentelemetry.sdk.environment_variables
import pytest
from opentelemetry.util.re import parse_env_headers

from llorch_worker.telemetry.traces import faults
from tests.forks import MODULE_PATH
from tests.telemetry.traces import otel_values

OTHERS = ("METRIC", "LOGS", "LOGRECORD", "BLRP", "ZIPKIN", "PROMETHEUS", "GRPC", "LOGGING")
"""Parts of the names that traces do not read."""
NAMES = sorted(
    value
    for module in (opentelemetry.environment_variables, opentelemetry.sdk.environment_variables)
    for value in vars(module).values()
    if isinstance(value, str)
    and value.startswith("OTEL_")
    and not any(part in value for part in OTHERS)
)
TAKES_ANY = {
    "OTEL_CONFIG_FILE", "OTEL_EXPORTER_OTLP_INSECURE", "OTEL_EXPORTER_OTLP_TRACES_INSECURE",
    "OTEL_LOG_LEVEL", "OTEL_PYTHON_CONTEXT", "OTEL_PYTHON_ID_GENERATOR",
    "OTEL_PYTHON_LOGGER_CONFIGURATOR", "OTEL_PYTHON_LOGGER_PROVIDER",
    "OTEL_PYTHON_METER_CONFIGURATOR", "OTEL_PYTHON_TRACER_CONFIGURATOR",
    "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME",
    "OTEL_TRACES_SAMPLER_ARG", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
}  # fmt: skip
"""Their values are free, or not read for traces."""
MORE = {
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4096",  # above the queue's
    "OTEL_BSP_MAX_QUEUE_SIZE": "1" + "0" * 30,
    "OTEL_BSP_SCHEDULE_DELAY": "1" + "0" * 18,
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "nan",
    "OTEL_PROPAGATORS": "tracecontext,b3",
    "OTEL_RESOURCE_ATTRIBUTES": "deployment=\udcff",
}


def told(surface: str, values: list[tuple[str, str]]) -> list[Any]:
    command = [sys.executable, otel_values.__file__]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    cases = json.dumps([[surface, *value] for value in values])
    printed = subprocess.run(
        [*command, cases], env=clean | {"PYTHONPATH": MODULE_PATH}, capture_output=True, check=True
    )
    return [each[1:] for each in json.loads(printed.stdout)]


def test_a_process_with_a_bad_value_runs_without_traces_and_says_which() -> None:
    values = [(name, "abc") for name in NAMES if name not in TAKES_ANY] + [*MORE.items()]
    for name, value, given, written in told("process", values):
        assert given == "no traces", (name, value, given)
        assert written.count("\n") == 0, written
        assert written.startswith("WARNING no traces: "), (name, value, written)
        assert name in written, written
        assert faults.shown(value) in written, written


def test_values_that_are_free_keep_the_traces() -> None:
    given = {name: each for name, _, each, _ in told("process", [(n, "a=b") for n in TAKES_ANY])}
    assert given == {name: ["traceparent"] for name in TAKES_ANY}


@pytest.mark.parametrize("surface", ["client", "gateway"])
def test_propagators_that_are_missing_fail_no_call(surface: str) -> None:
    names = ("OTEL_PROPAGATORS", "OTEL_PYTHON_TRACER_PROVIDER")
    cases = [(names[0], "b3"), (names[0], "none"), (names[1], "abc")]
    answers = {"client": [], "gateway": [200, 400]}
    for name, value, given, written in told(surface, cases):
        assert given == answers[surface], (name, value, given)
        warnings = [line for line in written.splitlines() if "no traces" in line]
        assert len(warnings) == (value != "none"), written


def test_a_header_of_the_collector_is_in_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "key=a,secret")
    with pytest.raises(faults.Refused) as refused, faults.checking():
        parse_env_headers(os.environ["OTEL_EXPORTER_OTLP_HEADERS"], liberal=True)
    assert "OTEL_EXPORTER_OTLP_HEADERS=..." in str(refused.value)
    assert "secret" not in str(refused.value)
