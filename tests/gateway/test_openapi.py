"""The OpenAPI document holds for whatever a client sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, WorkerProcess
from tests.sizes import sized

EXAMPLES = sized(usual=4, full=50)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture
def gateway(redis_server: RedisServer, tmp_path: Path) -> Iterator[GatewayProcess]:
    """One whose answers are short: without a maximum, they would fill the context."""
    with running_gateway(redis_server.url, tmp_path, max_tokens=8) as process:
        yield process


def test_every_answer_is_documented(gateway: GatewayProcess, toy_worker: WorkerProcess) -> None:
    document = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    assert operations
    for operation in operations:

        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def any_request(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        any_request()
