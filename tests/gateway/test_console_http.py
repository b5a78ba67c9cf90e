"""The console without a browser: who may ask what, and which files make the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.consoles import GUEST, OPERATOR, console_gateway
from tests.gateways import GatewayProcess
from tests.services import RedisServer


@pytest.fixture(scope="module")
def guarded(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    with console_gateway(redis_server.url, tmp_path_factory.mktemp("console")) as gateway:
        yield gateway


@pytest.fixture
def plain(guarded: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=60) as client:
        yield client


def test_what_operators_do_needs_their_key_and_json(plain: httpx.Client) -> None:
    def answer(method: str, path: str, key: str | None, **options: Any) -> int:
        headers = options.pop("headers", {})
        if key is not None:
            headers = headers | {"Authorization": f"Bearer {key}"}
        return plain.request(method, f"/console/api/{path}", headers=headers, **options).status_code

    for path in ("fleet", "jobs", "dead-letters"):
        tried = (None, "llorch-wrong", GUEST[0], OPERATOR[0])
        assert [answer("GET", path, key) for key in tried] == [401, 401, 403, 200]
    for path in ("dead-letters/retry", "dead-letters/drop"):
        body = {"ids": ["x"]}
        assert answer("POST", path, GUEST[0], json=body) == 403
        assert answer("POST", path, OPERATOR[0], json=body) == 200
        # A page of another origin can send such a request without asking the gateway first.
        for simple in ({}, {"Content-Type": "text/plain"}):
            text = json.dumps(body)
            assert answer("POST", path, OPERATOR[0], headers=simple, content=text) == 400


def test_the_pages_files_are_checked_by_etag_and_load_nothing_from_elsewhere(
    plain: httpx.Client,
) -> None:
    for path in ("/", "/console/main.js", "/console/console.css"):
        first = plain.get(path)
        policy = first.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert first.headers["x-content-type-options"] == "nosniff"
        again = {"If-None-Match": first.headers["etag"]}
        assert plain.get(path, headers=again).status_code == 304
    assert plain.get("/console/routes.py").status_code == 404
    assert plain.get("/console/..%2froutes.py").status_code == 404


def test_no_other_page_of_this_origin_runs_scripts(plain: httpx.Client) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert plain.get(path).status_code == 404
    assert plain.get("/openapi.json").status_code == 200


def test_without_keys_only_loopback_names_are_answered(
    gateway: GatewayProcess, guarded: GatewayProcess
) -> None:
    def status(url: str, host: str) -> int:
        return httpx.get(f"{url}/console/api/fleet", headers={"Host": host}).status_code

    port = gateway.url.rpartition(":")[2]
    for host in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", "127.0.0.2", "[::1]:80"):
        assert status(gateway.url, host) == 200
    # What a browser sends for a page whose site lets its name resolve to 127.0.0.1.
    for host in (f"evil.example:{port}", "localhost.evil.example", "10.0.0.1", "[", "", "0.0.0.0"):
        assert status(gateway.url, host) == 421
    # With keys a page of another site is nobody.
    assert status(guarded.url, "evil.example") == 401
