"""Silent and slow connections without a request harm nobody, and end."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from llorch_worker.gateway.connections import COMMENT
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess

MOST_WAITING = 20
SLOW_HEADER = b"GET /health HTTP/1.1\r\nX: "


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(
        redis_server.url, folder, header_timeout_s=1, waiting_connections=MOST_WAITING
    ) as process:
        yield process


def connect(gateway: GatewayProcess) -> socket.socket:
    host, port = gateway.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def ask(raw: socket.socket) -> None:
    raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += raw.recv(65536)


def test_a_connection_beyond_the_limit_closes_the_one_that_waits_longest(
    gateway: GatewayProcess,
) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(gateway)) for _ in range(3 * MOST_WAITING)]
        # They end in the order in which they came, however many there are.
        for each in silent[: 2 * MOST_WAITING]:
            assert each.recv(1) == b""
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 200


def test_requests_of_more_connections_than_may_wait_are_all_answered(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        running_gateway(redis_server.url, tmp_path, waiting_connections=MOST_WAITING) as gateway,
        ExitStack() as stack,
    ):
        begun = [stack.enter_context(connect(gateway)) for _ in range(5 * MOST_WAITING)]
        # Connections are accepted in the order in which they come.
        with connect(gateway) as last:
            ask(last)
        for each in begun:
            each.sendall(request)
        for each in begun:
            assert each.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_header_that_does_not_end_is_cut_off(gateway: GatewayProcess) -> None:
    with connect(gateway) as silent, connect(gateway) as dripping:
        dripping.sendall(SLOW_HEADER)
        dripping.settimeout(0.1)
        closed = False
        while not closed:
            with suppress(TimeoutError):
                try:
                    dripping.sendall(b"x")
                    closed = dripping.recv(1) == b""
                except ConnectionError:
                    closed = True
        assert silent.recv(1) == b""


def test_a_second_request_has_the_same_time_for_its_header(gateway: GatewayProcess) -> None:
    with connect(gateway) as kept, connect(gateway) as slow:
        ask(kept)
        ask(slow)
        slow.sendall(SLOW_HEADER)
        assert slow.recv(1) == b""
        # One that says nothing after an answer is kept alive.
        ask(kept)


def test_a_body_in_tiny_chunks_is_cut_off(gateway: GatewayProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(gateway) as raw, suppress(ConnectionError):
        raw.sendall(head)
        for _ in range(100):
            raw.sendall(b"1\r\na\r\n" * 10_000)
        raw.sendall(b"0\r\n\r\n")
        answer = raw.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"Invalid HTTP request" in answer


def test_a_body_may_come_in_many_chunks(gateway: GatewayProcess) -> None:
    chunks = (b"x" * 64 for _ in range(20_000))
    answer = httpx.post(f"{gateway.url}/v1/completions", content=chunks)
    assert "must be JSON" in answer.json()["error"]["message"]


def completion(prompt: str, version: str = "1.1", *, stream: bool = False) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 2, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    )
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


def test_a_client_that_closes_its_sending_half_gets_its_answers(
    gateway: GatewayProcess, toy_worker: WorkerProcess
) -> None:
    with connect(gateway) as raw:
        raw.sendall(completion("One") + completion("Two"))
        raw.shutdown(socket.SHUT_WR)
        answers = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.count(b'"finish_reason":"length"') == 2


def test_a_client_of_http_1_0_that_closes_its_sending_half_gets_its_answer(
    gateway: GatewayProcess, toy_worker: WorkerProcess
) -> None:
    with connect(gateway) as raw:
        raw.sendall(completion("One", "1.0"))
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_hangs_up_then_cancels_all_the_same(
    gateway: GatewayProcess, toy_worker: WorkerProcess, latch: Latch
) -> None:
    with connect(gateway) as raw:
        raw.sendall(completion(latch.prompt()))
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(65536).startswith(b"HTTP/1.1 102 ")
    latch.wait_ended(1)


def taken(raw: socket.socket, until: bytes) -> bytes:
    answer = b""
    while until not in answer and (more := raw.recv(65536)):
        answer += more
    return answer


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_closes_its_sending_half_gets_its_stream_to_the_end(
    gateway: GatewayProcess, toy_worker: WorkerProcess, latch: Latch, version: str
) -> None:
    with connect(gateway) as raw:
        raw.sendall(completion(latch.prompt(), version, stream=True))
        taken(raw, b"data: ")
        raw.shutdown(socket.SHUT_WR)
        # So that it is known to have gone on beside the closed half.
        assert COMMENT in taken(raw, COMMENT)
        latch.open()
        assert b"data: [DONE]" in b"".join(iter(lambda: raw.recv(65536), b""))


def test_a_client_that_hangs_up_amid_its_stream_cancels(
    gateway: GatewayProcess, toy_worker: WorkerProcess, latch: Latch
) -> None:
    with connect(gateway) as raw:
        raw.sendall(completion(latch.prompt(), stream=True))
        taken(raw, b"data: ")
        raw.shutdown(socket.SHUT_WR)
    latch.wait_ended(1)


def test_a_gateway_may_open_as_many_files_as_the_system_lets_it(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with running_gateway(redis_server.url, tmp_path, fresh=True) as process:
            limits = psutil.Process(process.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == (hard, hard)
