"""What HTTP clients of all kinds may send, and what they get."""

from __future__ import annotations

import socket

import httpx
import pytest
from websockets.sync.client import connect

from tests.gateways import GatewayProcess
from tests.services import WorkerProcess

ASK = {"prompt": "Once", "max_tokens": 1}


def raw_answer(gateway: GatewayProcess, target: str, host: str) -> bytes:
    """The answer to a GET, byte by byte as it came."""
    name, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((name, int(port)), timeout=30) as raw:
        raw.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: raw.recv(65536), b""))


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/toy", "/openapi.json"])
def test_a_slash_at_the_end_is_the_same_route(
    http: httpx.Client, toy_worker: WorkerProcess, path: str
) -> None:
    assert http.get(f"{path}/").status_code == 200
    assert http.get(f"{path}/").content == http.get(path).content


def test_a_body_arrives_whatever_the_path_ends_with(
    http: httpx.Client, gateway: GatewayProcess, toy_worker: WorkerProcess
) -> None:
    assert http.post("/v1/completions/", json=ASK).status_code == 200
    with connect(f"{gateway.url.replace('http', 'ws')}/v1/responses/") as line:
        line.send("{}")
        assert b"response.create" in line.recv(timeout=30, decode=False)
    assert http.get("/v1/nothing/").status_code == 404


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/models", "localhost", 200),
        ("HTTP://localhost:1/v1/models?x=http://a", "localhost", 200),
        ("http://localhost/v1/models", "evil.example", 200),
        ("http://evil.example/v1/models", "localhost", 421),
        ("http://localhost@evil.example/v1/models", "localhost", 421),
        ("http://localhost", "localhost", 200),
        ("ftp://localhost/v1/models", "localhost", 404),
    ],
)
def test_a_target_may_be_a_whole_url_whose_host_counts(
    gateway: GatewayProcess, target: str, host: str, status: int
) -> None:
    assert raw_answer(gateway, target, host).startswith(f"HTTP/1.1 {status} ".encode())
