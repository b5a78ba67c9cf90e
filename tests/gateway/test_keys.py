"""Keys: limits that hold among gateways, priorities, secrets; none beyond loopback is an error."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, TypeAdapter

from llorch_worker.broker.queues import route
from llorch_worker.broker.waiting.waiting import waiting
from llorch_worker.client import Client
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.gateway.keys import KeyRing, new_key
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.gateway.webhook_secret import WebhookSecret
from tests.cli.command import run
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, wait_until
from tests.store import record_of, waiting_ids

LIMIT = 5
SUBMITS = 60

SECRETS: TypeAdapter[SecretStr] = TypeAdapter(WebhookSecret)


@contextmanager
def two_gateways(
    redis_url: str, folder: Path, file: Path
) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    """Gateways that know the keys of ``file``."""
    first, second = folder / "first", folder / "second"
    for each in (first, second):
        each.mkdir()
    with (
        running_gateway(redis_url, first, keys=file) as one,
        running_gateway(redis_url, second, keys=file) as other,
    ):
        yield one, other


@pytest.fixture(scope="module")
def keyed(
    redis_server: RedisServer,
    toy_worker: WorkerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[GatewayProcess], dict[str, Any]]]:
    """Two gateways, and the headers of a caller with a limit and a low priority."""
    key, entry = new_key("limited")
    tmp_path = tmp_path_factory.mktemp("keyed")
    file = tmp_path / "keys.toml"
    file.write_text(f'{entry}max_jobs = {LIMIT}\npriority = "low"\n')
    with two_gateways(redis_server.url, tmp_path, file) as (first, second):
        yield [first, second], {"Authorization": f"Bearer {key}"}


def submit(gateway: GatewayProcess, headers: dict[str, Any], prompt: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2}
    return httpx.post(f"{gateway.url}/v1/jobs", json=body, headers=headers, timeout=60)


def test_a_limit_holds_exactly_among_gateways(
    keyed: tuple[list[GatewayProcess], dict[str, Any]], latch: Latch
) -> None:
    gateways, headers = keyed
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda number: submit(gateways[number % 2], headers, latch.prompt()),
                range(SUBMITS),
            )
        )
    assert Counter(a.status_code for a in answers) == {202: LIMIT, 429: SUBMITS - LIMIT}
    refused = next(a for a in answers if a.status_code == 429)
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    latch.open()
    wait_until(lambda: submit(gateways[0], headers, "x").status_code == 202)


def test_a_rate_holds_exactly_among_gateways_and_a_soft_one_lowers_the_priority(
    redis_server: RedisServer, toy_worker: WorkerProcess, client: Client, tmp_path: Path
) -> None:
    (hard, one), (soft, two) = new_key("hard"), new_key("soft")
    file = tmp_path / "keys.toml"
    # So that nothing becomes free during the test.
    file.write_text(f"{one}requests_per_day = {LIMIT}\n{two}requests_per_day = 1\nsoft = true\n")
    with two_gateways(redis_server.url, tmp_path, file) as (first, second):

        def send(number: int) -> httpx.Response:
            headers = {"Authorization": f"Bearer {hard}"}
            return submit((first, second)[number % 2], headers, "x")

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(send, range(SUBMITS)))
        assert Counter(a.status_code for a in answers) == {202: LIMIT, 429: SUBMITS - LIMIT}
        left = [a.headers["x-ratelimit-remaining-requests"] for a in answers if a.is_success]
        assert sorted(left) == [str(n) for n in range(LIMIT)]
        refused = next(a for a in answers if not a.is_success)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        day_s = 24 * 3600
        assert day_s / LIMIT - 60 < int(refused.headers["retry-after"]) <= day_s / LIMIT
        assert refused.headers["x-ratelimit-limit-requests"] == str(LIMIT)
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
        with toy_worker.paused():
            before = waiting(client.redis, "toy").queues["low"].jobs
            for beyond in (0, 1):
                answer = submit(first, {"Authorization": f"Bearer {soft}"}, "x")
                assert answer.status_code == 202
                assert waiting(client.redis, "toy").queues["low"].jobs == before + beyond


def test_a_key_gives_its_jobs_their_priority_and_its_name_as_tenant(
    keyed: tuple[list[GatewayProcess], dict[str, Any]],
    toy_worker: WorkerProcess,
    client: Client,
) -> None:
    (gateway, _), headers = keyed
    with toy_worker.paused():
        before = set(waiting_ids(client.redis))
        submit(gateway, headers, "x")
        (job_id,) = set(waiting_ids(client.redis)) - before
        record = record_of(client.redis, job_id)
        assert record["list"] == route("toy", "low").list_key
        assert record["tenant"]


def test_every_endpoint_but_those_of_health_asks_for_a_key(
    keyed: tuple[list[GatewayProcess], dict[str, Any]],
) -> None:
    (gateway, _), _headers = keyed
    paths = httpx.get(f"{gateway.url}/openapi.json").json()["paths"]
    open_to_all = {
        (method, path)
        for path, operations in paths.items()
        for method in operations
        if httpx.request(
            method, f"{gateway.url}{path.replace('{', '').replace('}', '')}", json={}
        ).status_code
        != 401
    }
    assert open_to_all == {("get", "/health"), ("get", "/ready")}


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/files HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=x",
        "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json",
    ],
)
def test_nothing_is_read_of_a_body_without_a_key(
    keyed: tuple[list[GatewayProcess], dict[str, Any]], head: str
) -> None:
    (gateway, _), _headers = keyed
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(f"{head}\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n--x\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 401 ")


def test_beyond_loopback_a_gateway_without_keys_does_not_start() -> None:
    ran = run("gateway", "--host", "0.0.0.0", "--json")
    assert ran.code == 2
    assert json.loads(ran.out or ran.err)["error"]["code"] == "KEYS_NEEDED"


def test_a_file_that_breaks_a_rule_keeps_the_gateway_from_starting(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "a b"\nsha256 = "0"\nwebhook_secret = "whsec_hush"\n')
    with pytest.raises(CommandError) as refused:
        KeyRing(file)
    for field in ("name", "sha256", "webhook_secret"):
        assert f"keys.0.{field}" in str(refused.value)
    assert "hush" not in str(refused.value)


def test_a_broken_file_is_logged_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, entry = new_key("one")
    file = tmp_path / "keys.toml"
    file.write_text(entry)
    ring = KeyRing(file)
    file.write_text("not toml")
    assert [ring.caller(key) is not None for _ in range(3)] == [True] * 3
    assert len(caplog.records) == 1
    file.write_text("")
    assert ring.caller(key) is None


def test_a_new_key_brings_a_secret_for_its_webhooks(tmp_path: Path) -> None:
    _, entry = new_key("one")
    file = tmp_path / "keys.toml"
    file.write_text(entry)
    secret = KeyRing(file).webhook_secret("one")
    assert secret is not None
    assert SECRETS.validate_python(secret).get_secret_value() == secret
    assert KeyRing(file).webhook_secret("two") is None


@pytest.mark.parametrize("name", ['al"ice', "a\noperator = true", "", "a b", "é", "a" * 101])
def test_a_name_that_the_file_cannot_hold_gets_no_key(name: str) -> None:
    ran = run("gateway-key", name)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: a key's name must be 1 to 100 of A-Za-z0-9._-")
    assert ran.err.count("\n") == 1


def test_a_byte_order_mark_in_the_file_is_read_over(tmp_path: Path) -> None:
    key, entry = new_key("one")
    file = tmp_path / "keys.toml"
    file.write_text(entry, encoding="utf-8-sig")
    assert KeyRing(file).caller(key) is not None
    file.write_text(entry, encoding="utf-16")
    with pytest.raises(CommandError, match="UTF-8"):
        KeyRing(file)


@pytest.mark.parametrize(
    ("written", "origin"),
    [
        ("https://app/", "https://app"),
        ("https://App.Example:443", "https://app.example"),
        ("http://[::1]:3000/", "http://[::1]:3000"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_an_origin_is_kept_as_browsers_send_it(written: str, origin: str) -> None:
    assert GatewaySettings(cors_origins=written).cors_origins == (origin,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "written", ["app.example", "https://app/page", "https://*.app", "https://a b", "https://a?b=c"]
)
def test_what_no_browser_sends_as_an_origin_is_refused_with_what_to_write(written: str) -> None:
    ran = run("gateway", LLORCH_GATEWAY_CORS_ORIGINS=f"https://app, {written}")
    assert ran.code == 2
    assert f"LLORCH_GATEWAY_CORS_ORIGINS: '{written}' is no origin; write it as" in ran.err


@pytest.mark.parametrize("wrong", ["", "secret", "whsec_", "whsec_!!", "whsec_c2hvcnQ="])
def test_what_is_no_secret_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="base64"):
        SECRETS.validate_python(wrong)


def test_other_origins_may_call_only_if_the_operator_says_so(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    for origins, allowed in (("", None), ("https://a.example", "https://a.example")):
        with running_gateway(redis_server.url, tmp_path, cors_origins=origins) as gateway:
            plain = httpx.get(f"{gateway.url}/health", headers=asks)
            assert plain.headers.get("access-control-allow-origin") == allowed
            preflight = httpx.options(f"{gateway.url}/v1/jobs", headers=asks)
            assert preflight.headers.get("access-control-allow-origin") == allowed
            call = httpx.post(f"{gateway.url}/v1/files", headers={"Origin": "https://a.example"})
            assert call.status_code == (400 if allowed else 403)
