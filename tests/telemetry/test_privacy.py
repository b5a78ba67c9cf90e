"""Nothing that users write, or that is written for them, is in a trace or a log."""

from __future__ import annotations

import httpx
import pytest

from tests.disguises import assert_hidden
from tests.gateways import GatewayProcess
from tests.services import WorkerProcess
from tests.telemetry.collector import Collector

QUEUE = "llorch.toy"
SECRET = "zqxPROMPTxqz"
GENERATED = "w0 w1 w2 w3 w4 w5 w6"
GET_S = 60


@pytest.mark.parametrize("stream", [False, True])
def test_http_shows_nothing(
    stream: bool, traced_worker: WorkerProcess, gateway: GatewayProcess, collector: Collector
) -> None:
    body = {"model": "toy", "prompt": SECRET, "max_tokens": 20, "stream": stream, "stop": SECRET}
    for status, changed in (
        (200, {}),
        (400, {"max_tokens": SECRET}),
        (400, {"logit_bias": {SECRET: SECRET}}),
        (500, {"prompt": f"raise ValueError {SECRET}"}),
    ):
        answer = httpx.post(
            f"{gateway.url}/v1/completions?prompt={SECRET}", json=body | changed, timeout=60
        )
        assert answer.status_code == status
    collector.wait_until_named("POST /v1/completions")
    collector.wait_until_named("publish llorch.toy")
    shown = b"".join(collector.bodies) + traced_worker.log.read_bytes() + gateway.log.read_bytes()
    assert_hidden(shown, (SECRET, GENERATED))
