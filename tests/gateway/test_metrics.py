"""``/metrics`` of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import ClientDisconnect

from llorch_worker.client import Client
from llorch_worker.gateway.app import create_app
from llorch_worker.gateway.keys import new_key
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.settings import Settings
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, wait_until
from tests.sizes import sized
from tests.telemetry.scraping import STRANGE, scrape

HANG_UPS = sized(60, 500)
REQUESTS = "llorch_gateway_requests_total"


@pytest.fixture
def toy_gateway(
    own_server: RedisServer, own_worker: WorkerProcess, tmp_path: Path
) -> Iterator[GatewayProcess]:
    with running_gateway(own_server.url, tmp_path) as gateway:
        yield gateway


def test_requests_are_counted_by_their_route_and_never_by_their_url(
    toy_gateway: GatewayProcess,
) -> None:
    with httpx.Client(base_url=toy_gateway.url) as http:
        job = http.post("/v1/jobs", json={"prompt": "zqxPROMPTxqz", "max_tokens": 2}).json()["id"]
        for _ in range(3):
            assert http.get(f"/v1/jobs/{job}").status_code == 200
        assert http.get("/v1/jobs/unknown-job").status_code == 404
        assert http.get("/no/such/path").status_code == 404
        assert http.delete("/health").status_code == 405
        assert http.request("ZQXMETHODXQZ", "/health").status_code == 405
        assert http.get("/console/api/session").status_code == 200
        assert http.get("/console/api/jobs").status_code == 200
        found = scrape(toy_gateway.url)
    assert found(REQUESTS, method="POST", route="/v1/jobs", status="202") == 1
    assert found(REQUESTS, method="GET", route="/v1/jobs/{job_id}", status="200") == 3
    assert found(REQUESTS, method="GET", route="/v1/jobs/{job_id}", status="404") == 1
    assert found(REQUESTS, route="other", status="404") == 1
    assert found(REQUESTS, method="other", route="/health", status="405") == 1
    assert found(REQUESTS, route="/console/api/session", status="200") == 1
    assert found(REQUESTS, route="/console/api/jobs", status="200") == 1
    assert found("llorch_gateway_request_seconds_count", route="/v1/jobs/{job_id}") == 4
    assert found("llorch_gateway_open_requests") == 0
    for hidden in (job, "unknown-job", "no/such", "zqx", "ZQX"):
        assert hidden not in found.text


def test_a_defect_is_a_500_and_a_hang_up_a_499(redis_server: RedisServer, tmp_path: Path) -> None:
    app = create_app(Settings(redis_url=redis_server.url), GatewaySettings(files=str(tmp_path)))

    @app.get("/defect")
    def defect() -> None:
        raise ZeroDivisionError

    @app.get("/hang-up")
    def hang_up() -> None:
        raise ClientDisconnect

    async def get(path: str) -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get(path)).status_code

    assert asyncio.run(get("/defect")) == 500
    asyncio.run(get("/hang-up"))

    def counted(path: str, status: str) -> float | None:
        labels = {"method": "GET", "route": path, "status": status}
        value: float | None = app.state.metrics.registry.get_sample_value(REQUESTS, labels)
        return value

    assert (counted("/defect", "500"), counted("/defect", "499")) == (1, None)
    assert (counted("/hang-up", "499"), counted("/hang-up", "500")) == (1, None)


def test_a_gateway_tells_of_the_fleet_as_the_exporter_does(toy_gateway: GatewayProcess) -> None:
    found = scrape(toy_gateway.url)
    assert found("llorch_fleet_workers", model_name="toy") == 1
    assert found("llorch_fleet_slots", model_name="toy") == 2
    assert found("llorch_redis_up") == 1
    for accept in STRANGE:
        assert scrape(toy_gateway.url, headers={"Accept": accept})("llorch_redis_up") == 1


def test_only_operators_may_scrape(
    own_server: RedisServer, own_worker: WorkerProcess, tmp_path: Path
) -> None:
    (operator, its_entry), (caller, entry) = new_key("prometheus"), new_key("alice")
    file = tmp_path / "keys.toml"
    file.write_text(f"{its_entry}operator = true\n{entry}")

    def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{gateway.url}/metrics", headers=headers).status_code

    with running_gateway(own_server.url, tmp_path, keys=file) as gateway:
        assert (status(None), status("wrong"), status(caller), status(operator)) == (
            401,
            401,
            403,
            200,
        )
        headers = {"Authorization": f"Bearer {operator}"}
        text = scrape(gateway.url, headers=headers).text
        assert "alice" not in text
        assert "prometheus" not in text.replace("prometheus_", "")


def test_a_redis_that_does_not_reply_stops_no_request(
    own_server: RedisServer, toy_gateway: GatewayProcess
) -> None:
    scrape(toy_gateway.url)

    async def ask() -> list[int]:
        async with httpx.AsyncClient(base_url=toy_gateway.url, timeout=60) as http:
            scrapes = [asyncio.create_task(http.get("/metrics")) for _ in range(50)]
            while not any(each.done() for each in scrapes):
                # Many more than the threads that FastAPI has.
                assert (await http.get("/health")).status_code == 200
                await asyncio.sleep(0.1)
            return [answer.status_code for answer in await asyncio.gather(*scrapes)]

    wait_until(lambda: scrape(toy_gateway.url)("llorch_redis_up") == 1)
    with own_server.paused():
        assert set(asyncio.run(ask())) == {200}


def test_gauges_return_to_zero_after_clients_that_hang_up(
    toy_gateway: GatewayProcess, own_client: Client, latch: Latch
) -> None:
    body = {"model": "toy", "prompt": latch.prompt(), "max_tokens": 50}

    async def hang_up(number: int) -> None:
        async with httpx.AsyncClient(base_url=toy_gateway.url, timeout=60) as http:
            request = http.build_request(
                "POST", "/v1/completions", json=body | {"stream": number % 2 == 0}
            )
            asking = asyncio.create_task(http.send(request, stream=True))
            await asyncio.wait([asking], timeout=0.05 * (number % 5))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def all_of_them() -> None:
        room = asyncio.Semaphore(50)

        async def one(number: int) -> None:
            async with room:
                await hang_up(number)

        await asyncio.gather(*(one(number) for number in range(HANG_UPS)))

    asyncio.run(all_of_them())
    latch.open()
    gauges = (
        "llorch_gateway_open_requests",
        "llorch_fleet_queue_length",
        "llorch_fleet_oldest_job_age_seconds",
        "llorch_fleet_running",
        "llorch_fleet_waiting",
        "llorch_fleet_saturation",
    )
    wait_until(lambda: not any(map(scrape(toy_gateway.url), gauges)), timeout_s=60)
